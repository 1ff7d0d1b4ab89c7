"""Arguments of models, their methods and files that are of a wrong kind: refused by name, before any work is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.models.checkpoint import load_checkpoint, load_into

SIZES = dict(
    vocab_size=23, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
    max_position_embeddings=16,
)  # fmt: skip
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
OFFSETS = torch.tensor([0, 3, 6], dtype=torch.int32)
VALUE = torch.randn(2, 2, 3, 4)
ARRAY = np.zeros(3, np.float32)


def make(name: str = "BertModel", **config: Any) -> Any:
    return getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **config}))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A mark for every encoder that runs."""
    found: list[Any] = []
    from bert_fast.modules.encoder import BertEncoder

    forward = BertEncoder.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(BertEncoder, "forward", marked)
    return found


@pytest.mark.parametrize("flag", ["yes", 1, ARRAY, torch.zeros(3)], ids=["string", "int", "array", "tensor"])
@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states", "return_dict", "use_cache"])
def test_flags_are_bools(name: str, flag: Any, runs: list[Any]) -> None:
    for model in ("BertModel", "BertLMHeadModel"):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool, got {type(flag).__name__}"):
            make(model, is_decoder=True)(IDS, **{name: flag})
    assert not runs


def test_logits_are_asked_for_by_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^output_logits: expected a bool, got str"):
        make("BertForMaskedLM")(IDS, output_logits="no")


PLACES: dict[str, Callable[[], Tensor]] = {
    "attention_mask": lambda: torch.ones(2, 3),
    "token_type_ids": lambda: torch.zeros_like(IDS),
    "position_ids": lambda: torch.arange(3),
    "head_mask": lambda: torch.ones(2),
    "encoder_hidden_states": lambda: torch.zeros(2, 4, 8),
    "encoder_attention_mask": lambda: torch.ones(2, 4),
    "dropout_seed": lambda: torch.tensor([1]),
}


@pytest.mark.parametrize("name", PLACES)
def test_arguments_lie_beside_the_tokens(name: str, runs: list[Any]) -> None:
    model = make(is_decoder=True, add_cross_attention=True)
    arguments = {} if "encoder" not in name else {"encoder_hidden_states": PLACES["encoder_hidden_states"]()}
    for training in (True, False):
        with pytest.raises(ValueError, match=f"^{name}: expected device cpu .*, got meta"):
            model.train(training)(IDS, **{**arguments, name: PLACES[name]().to("meta")})
        with pytest.raises(TypeError, match=f"^{name}: expected a (dense )?Tensor"):
            model(IDS, **{**arguments, name: PLACES[name]().to_sparse()})
    assert not runs


def test_masks_on_meta_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match=r"^attention_mask: expected a Tensor with values"):
        make().to("meta")(IDS.to("meta"), attention_mask=torch.ones(2, 3, device="meta"))


def test_offsets_lie_beside_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected device cpu .*, got meta"):
        make()(IDS.flatten(), cu_seqlens=OFFSETS.to("meta"), max_seqlen=3)


LABELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "words": ("BertForMaskedLM", {"labels": IDS}, "labels"),
    "next words": ("BertLMHeadModel", {"labels": IDS}, "labels"),
    "positions": ("BertForMaskedLM", {"masked_lm_positions": torch.tensor([1])}, "masked_lm_positions"),
    "class": ("BertForSequenceClassification", {"labels": torch.zeros(2, dtype=torch.long)}, "labels"),
    "numbers": ("BertForSequenceClassification", {"labels": torch.zeros(2, 2)}, "labels"),
    "tokens": ("BertForTokenClassification", {"labels": torch.zeros_like(IDS)}, "labels"),
    "start": (
        "BertForQuestionAnswering",
        dict.fromkeys(("start_positions", "end_positions"), IDS[:, 0]),
        "end_positions",
    ),
}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.filterwarnings("ignore:BertLMHeadModel")
def test_labels_lie_beside_the_tokens(case: str) -> None:
    name, arguments, wrong = LABELS[case]
    for value, error, message in (
        (arguments[wrong].to("meta"), ValueError, "expected device cpu"),
        (arguments[wrong].tolist(), TypeError, "expected a Tensor, got list"),
        (arguments[wrong].to(torch.complex64), TypeError, "expected"),
    ):
        with pytest.raises(error, match=f"^{wrong}: {message}"):
            make(name)(IDS, **{**arguments, wrong: value})


@pytest.mark.parametrize(
    "name", ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "cu_seqlens"]
)
@pytest.mark.parametrize("value", ["", 1j, ARRAY], ids=["string", "complex", "array"])
def test_choices_are_tensors(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {} if name == "inputs_embeds" else {"input_ids": IDS.unsqueeze(1)}
    with pytest.raises(TypeError, match=f"^{name}: expected a Tensor, got {type(value).__name__}"):
        make("BertForMultipleChoice")(**{**arguments, name: value})


def test_numbers_of_choices() -> None:
    model = make("BertForMultipleChoice")
    with pytest.raises(ValueError, match=r"^input_ids: expected at least one choice, got shape \[2, 0, 3\]"):
        model(IDS.unsqueeze(1)[:, :0])
    for number in ("1", ARRAY):
        with pytest.raises(TypeError, match=r"^num_choices: expected an int"):
            model(IDS.flatten(), cu_seqlens=OFFSETS, max_seqlen=3, num_choices=number)


@pytest.mark.parametrize(
    ("keep", "error"),
    [("1", TypeError), (1.0, TypeError), (-1, ValueError), (torch.zeros(2, 2, dtype=torch.long), ValueError),
     (torch.zeros(2), TypeError), (torch.tensor([3]), ValueError), (torch.tensor([-4]), ValueError)],
    ids=["string", "float", "negative", "matrix", "floats", "high", "low"],
)  # fmt: skip
def test_columns_to_keep(keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^logits_to_keep: expected"):
        make("BertLMHeadModel", is_decoder=True)(IDS, logits_to_keep=keep)


@pytest.mark.parametrize(
    ("past", "error"),
    [({}, TypeError), ([1, 2], TypeError), (((VALUE, VALUE),), ValueError), (((VALUE, VALUE[:, :1]),) * 2, ValueError),
     (((VALUE, VALUE.double()),) * 2, TypeError), (((VALUE.double(),) * 2,) * 2, TypeError),
     (((VALUE.to("meta"),) * 2,) * 2, ValueError), (((VALUE.to_sparse(),) * 2,) * 2, TypeError)],
    ids=["dict", "numbers", "layers", "heads", "mixed", "dtype", "device", "sparse"],
)  # fmt: skip
def test_caches_fit_the_model(past: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^past_key_values: expected"):
        make(is_decoder=True)(IDS, past_key_values=past)


def test_memories_fit_the_decoder() -> None:
    model = make(is_decoder=True, add_cross_attention=True).eval()
    with pytest.raises(TypeError, match=r"^encoder_hidden_states: expected dtype float32 .* got bfloat16"):
        model(IDS, encoder_hidden_states=torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    cache = model(IDS, encoder_hidden_states=torch.zeros(2, 4, 8)).past_key_values
    with pytest.raises(ValueError, match=r"^encoder_hidden_states: expected 4 columns .* got 5"):
        model(IDS[:, :1], encoder_hidden_states=torch.zeros(2, 5, 8), past_key_values=cache)


@pytest.mark.parametrize("index", [[0, 1], torch.zeros(2), torch.zeros(2, 1).long(), torch.tensor([2])])
def test_beams_are_rows(index: Any) -> None:
    cache = make(is_decoder=True).eval()(IDS).past_key_values
    with pytest.raises((TypeError, ValueError), match=r"^beam_idx: expected"):
        cache.reorder_cache(index)


METHODS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "heads": (lambda m: m.prune_heads([0]), TypeError, "heads_to_prune: expected a mapping"),
    "layers": (
        lambda m: m.prune_heads({torch.ones(2): [0]}),
        ValueError,
        r"heads_to_prune: expected layers in \[0, 2\)",
    ),
    "one head": (lambda m: m.prune_heads({1: 2}), TypeError, r"heads_to_prune\[1\]: expected a list of heads, got int"),
    "names": (lambda m: m.prune_heads({1: "0"}), TypeError, r"heads_to_prune\[1\]: expected an int, got str"),
    "table": (lambda m: m.set_input_embeddings([1]), TypeError, "new_embeddings: expected a torch.nn.Module, got list"),
    "width": (
        lambda m: m.set_input_embeddings(nn.Embedding(23, 5)),
        ValueError,
        r"new_embeddings: expected embedding_dim 8 \(hidden_size\), got 5",
    ),
    "projection": (
        lambda m: m.set_output_embeddings(nn.Linear(5, 23)),
        ValueError,
        r"new_embeddings: expected in_features 8 \(hidden_size\), got 5",
    ),
    "parameters": (lambda m: m.num_parameters(ARRAY), TypeError, "only_trainable: expected a bool, got ndarray"),
    "tables": (lambda m: m.num_parameters(False, 1), TypeError, "exclude_embeddings: expected a bool, got int"),
    "mean": (lambda m: m.resize_token_embeddings(30, None, ARRAY), TypeError, "mean_resizing: expected a bool"),
    "every": (
        lambda m: m.activation_checkpointing_enable(every_n_layers="1"),
        TypeError,
        "every_n_layers: expected an int, got str",
    ),
    "offload": (lambda m: m.gradient_checkpointing_enable(offload=ARRAY), TypeError, "offload: expected a bool"),
    "kwargs": (
        lambda m: m.gradient_checkpointing_enable([1]),
        TypeError,
        "gradient_checkpointing_kwargs: expected a mapping or None, got list",
    ),
    "unknown": (
        lambda m: m.activation_checkpointing_enable({"reentrant": True}),
        TypeError,
        "activation_checkpointing_kwargs: expected arguments of torch.utils.checkpoint .* got 'reentrant'",
    ),
    "pooling": (
        lambda m: bert_fast.BertModel(m.config, "yes"),  # type: ignore[arg-type]
        TypeError,
        "add_pooling_layer: expected a bool, got str",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods_name_their_arguments(case: str) -> None:
    call, error, message = METHODS[case]
    model = make("BertForMaskedLM")
    with pytest.raises(error, match=f"^{message}"):
        call(model)


def test_words_without_a_weight() -> None:
    model = make("BertForMaskedLM")
    model.set_input_embeddings(nn.Identity())
    with pytest.raises(ValueError, match=r"^config.tie_word_embeddings: expected False for words from a Identity"):
        model.tie_weights()
    with pytest.raises(ValueError, match=r"^new_num_tokens: expected None for words from a Identity, got 30"):
        model.resize_token_embeddings(30)


@pytest.mark.parametrize("path", [3, None, b"x", [1], ARRAY], ids=["int", "none", "bytes", "list", "array"])
def test_paths_are_names(path: Any) -> None:
    model = make()
    for name, call in (
        ("path", bert_fast.BertModel.from_pretrained),
        ("path", bert_fast.BertConfig.from_pretrained),
        ("path", bert_fast.BertConfig.from_json_file),
        ("path", load_checkpoint),
        ("directory", model.save_pretrained),
        ("directory", model.config.save_pretrained),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a str or a path, got {type(path).__name__}"):
            call(path)


def test_places_to_write_to_have_names(tmp_path: Path) -> None:
    model = make()
    for save in (model.save_pretrained, model.config.save_pretrained):
        with pytest.raises(ValueError, match=r"^directory: expected the name of a file, got one with a NUL"):
            save(tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("ignore_mismatched_sizes", ARRAY, TypeError), ("ignore_mismatched_sizes", 1, TypeError),
     ("num_labels", torch.zeros(3), TypeError), ("num_labels", "3", TypeError), ("dtype", ARRAY, ValueError),
     ("device", 2**64, ValueError), ("device", True, ValueError), ("device", ARRAY, ValueError),
     ("device", "cuda:63", ValueError), ("add_pooling_layer", 1, TypeError)],
    ids=["array", "number", "labels", "string", "dtype", "huge", "bool", "device", "absent", "pooling"],
)  # fmt: skip
def test_options_of_loading(tmp_path: Path, name: str, value: Any, error: type[Exception]) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(error, match=f"{name}: expected"):
        bert_fast.BertModel.from_pretrained(tmp_path, **{name: value})


def test_options_of_state_dicts(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"^dtype: expected a torch.dtype or None, got str"):
        load_checkpoint(tmp_path, dtype="float16")  # type: ignore[arg-type]
    for name in ("strict", "ignore_mismatched_sizes"):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            load_into(model, model.state_dict(), **{name: torch.zeros(3)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got dict"):
        load_into({}, model.state_dict())  # type: ignore[arg-type]


def test_configurations_of_arrays() -> None:
    with pytest.raises(TypeError, match=r"^id2label: expected a mapping"):
        bert_fast.BertConfig(id2label=ARRAY)
    for values in (3, [1], None):
        with pytest.raises(TypeError, match=r"^values: expected a mapping"):
            bert_fast.BertConfig.from_dict(values)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^values: expected names as keys"):
        bert_fast.BertConfig.from_dict({1: 2})  # type: ignore[dict-item]


def test_longest_sequences_may_be_any_number() -> None:
    """max_seqlen is a bound; where positions are given, no table bounds it."""
    arguments: dict[str, Any] = {"cu_seqlens": OFFSETS, "position_ids": torch.arange(3).repeat(2)}
    answers = make("BertForQuestionAnswering").eval()
    positions = {"start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([1, 9])}
    exact, loose = (
        answers(IDS.flatten(), max_seqlen=longest, output_attentions=True, **arguments, **positions)
        for longest in (6, 2**31 - 1)
    )
    assert torch.equal(exact.loss, loose.loss) and torch.equal(exact.attentions[0], loose.attentions[0])
    with pytest.raises(ValueError, match=r"^max_seqlen: expected at most 65536 keys a sequence where dropout_p is 0.1"):
        make().train()(IDS.flatten(), max_seqlen=2**31 - 1, **arguments)


def test_nothing_to_learn_from_is_a_loss_of_zero() -> None:
    """No sequences, or sequences without tokens: PyTorch's means would be NaN."""
    for config, labels in (
        ({"num_labels": 1}, torch.zeros(0, 1)),
        ({"problem_type": "multi_label_classification"}, torch.zeros(0, 2)),
    ):
        loss = make("BertForSequenceClassification", **config)(IDS[:0], labels=labels).loss
        loss.backward()
        assert loss.item() == 0
    answers = make("BertForQuestionAnswering")
    loss = answers(IDS[:, :0], start_positions=torch.tensor([0, 3]), end_positions=torch.tensor([0, 3])).loss
    loss.backward()
    assert loss.item() == 0 and not answers.qa_outputs.weight.grad.any()


def test_tokens_and_labels_without_values_beside_parameters_with_them() -> None:
    tokens = torch.ones(1, 5, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="expected device cpu"):
        make("BertForMaskedLM")(tokens, labels=tokens)
