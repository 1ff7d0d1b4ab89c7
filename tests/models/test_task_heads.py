"""The heads: same masks and losses as the reference, packed as padded, only the rows they need, bad labels by name."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.models.heads import pooled_sequences, predict_words
from bert_fast.modules.call import Call
from bert_fast.modules.encoder import BertEncoder
from bert_fast.reference import heads as reference
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import randomize

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
)  # fmt: skip
HEADS = [
    "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
]  # fmt: skip
BATCH, LENGTH, CHOICES = 4, 9, 3
LENGTHS = torch.tensor([9, 4, 0, 7])
SEED = torch.tensor([2**40 + 3])


def make(name: str, **changes: Any) -> Any:
    config = bert_fast.BertConfig(**{**SIZES, "is_decoder": name == "BertLMHeadModel", **changes})
    model = getattr(bert_fast, name)(config)
    randomize(model)
    return model.train()


def keep_mask(name: str = "BertModel") -> Tensor:
    keep = torch.arange(LENGTH) < LENGTHS[:, None]
    return keep[:, None].expand(BATCH, CHOICES, LENGTH) if name == "BertForMultipleChoice" else keep


def labels_of(name: str) -> dict[str, Tensor]:
    """Labels for a padded batch; some on padding, which must not count."""
    words = torch.randint(0, 50, (BATCH, LENGTH))
    by_head = {
        "BertForPreTraining": {"labels": words, "next_sentence_label": torch.tensor([0, 1, 1, 0])},
        "BertForNextSentencePrediction": {"labels": torch.tensor([1, 0, 1, 1])},
        "BertForSequenceClassification": {"labels": torch.tensor([2, 0, 1, 1])},
        "BertForMultipleChoice": {"labels": torch.tensor([2, 0, 1, 1])},
        "BertForTokenClassification": {"labels": words % 3},
        "BertForQuestionAnswering": {
            "start_positions": torch.tensor([3, 0, 9, -5]), "end_positions": torch.tensor([[8], [3], [11], [6]]),
        },
    }  # fmt: skip
    labels = by_head.get(name, {"labels": words})
    if labels.get("labels", words[0]).dim() == 2:
        labels["labels"] = torch.where(torch.rand(BATCH, LENGTH) < 0.4, labels["labels"], -100)
        labels["labels"][0, 3:6] = 1
    return labels


def padded(name: str) -> dict[str, Any]:
    keep = keep_mask(name)
    ids = torch.randint(1, 50, keep.shape)
    return {"input_ids": ids, "attention_mask": keep, "token_type_ids": ids % 2, **labels_of(name)}


def packed(name: str, call: dict[str, Any]) -> dict[str, Any]:
    keep = keep_mask(name)
    by_token = [key for key, value in call.items() if value.shape == keep.shape and key != "attention_mask"]
    rest = {key: value for key, value in call.items() if key not in by_token and key != "attention_mask"}
    lengths = keep.flatten(0, -2).sum(1)
    layout = {"cu_seqlens": nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), "max_seqlen": LENGTH}
    choices = {"num_choices": CHOICES} if name == "BertForMultipleChoice" else {}
    return rest | {key: call[key][keep] for key in by_token} | layout | choices


def run(model: nn.Module, call: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(**call)
    output.loss.backward()
    names = ("loss", "logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")
    results = {name: value.detach() for name in names if (value := getattr(output, name, None)) is not None}
    return results | {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- against the reference


@pytest.mark.parametrize("name", HEADS)
def test_training_with_dropout_is_the_references(name: str) -> None:
    """Outputs, loss and every gradient; with an empty sequence, and labels on padding."""
    fast, call = make(name), padded(name)
    models = {dtype: getattr(reference, f"Reference{name}")(fast.config).train() for dtype in (32, 64)}
    for dtype, model in models.items():
        model.load_state_dict(fast.state_dict())
        models[dtype] = model.double() if dtype == 64 else model
    plain, truth = (run(model, call | {"dropout_seed": SEED}) for model in models.values())
    predicts = hasattr(fast, "cls") and hasattr(fast.cls, "predictions")
    actual = run(fast, call | {"dropout_seed": SEED} | ({"output_logits": True} if predicts else {}))
    assert actual.keys() == truth.keys()
    for key, value in truth.items():
        finite = value > torch.finfo(torch.float32).min  # scores of padding in question answering
        assert torch.equal(finite, actual[key] > torch.finfo(torch.float32).min)
        value, plain_value, actual_value = (t.where(finite, t.new_zeros(())) for t in (value, plain[key], actual[key]))
        scale = max(1.0, value.abs().max().item())
        kind = "gradient" if key.startswith("grad") else "output"
        assert_close_to_truth("fast_model", kind, actual_value / scale, plain_value / scale, value / scale)


@pytest.mark.parametrize("name", HEADS)
def test_packed_is_padded(name: str) -> None:
    model, call = make(name), padded(name) | {"dropout_seed": SEED}
    keep, results = keep_mask(name), []
    for inputs in (call, packed(name, call)):
        results.append(run(model, inputs))
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        by_token = value.shape[:2] == keep.shape and not key.startswith("grad")
        assert torch.equal(value[keep] if by_token else value, results[1][key]), key


def test_positions_of_another_window_in_packed_input() -> None:
    """A position beyond its own sequence counts for nothing, though another sequence is longer."""
    model = make("BertForQuestionAnswering").eval()
    call = packed("BertForQuestionAnswering", padded("BertForQuestionAnswering"))
    call["start_positions"], call["end_positions"] = torch.tensor([2, 6, 0, 1]), torch.tensor([2, 6, 0, 1])
    without = call | {key: torch.where(call[key] == 6, 100, call[key]) for key in ("start_positions", "end_positions")}
    assert torch.equal(model(**call).loss, model(**without).loss)


# --- the rows that are needed


@pytest.fixture
def rows_of_last_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """How many tokens the encoder was asked for in every call; None: all."""
    asked: list[int | None] = []
    forward = BertEncoder.forward

    def note(self: BertEncoder, *args: Any, call: Call, **kwargs: Any) -> Tensor:
        asked.append(None if call.rows is None else len(call.rows))
        return forward(self, *args, call=call, **kwargs)

    monkeypatch.setattr(BertEncoder, "forward", note)
    return asked


@pytest.mark.parametrize("name", HEADS)
def test_last_layer_computes_what_the_head_reads(name: str, rows_of_last_layer: list[int | None]) -> None:
    model, call = make(name), padded(name)
    keep, num_sequences = keep_mask(name), int((LENGTHS > 0).sum())
    model(**call)
    labelled = (call["labels"] != -100) & keep if name in HEADS[:2] else None
    if name == "BertForPreTraining":
        labelled = labelled | (torch.arange(LENGTH) == 0) & keep
    expected = {
        "BertForNextSentencePrediction": num_sequences,
        "BertForSequenceClassification": num_sequences,
        "BertForMultipleChoice": CHOICES * num_sequences,
        "BertForTokenClassification": None,
        "BertForQuestionAnswering": None,
    }
    if name == "BertLMHeadModel":
        following = nn.functional.pad(call["labels"], (0, 1), value=-100)[:, 1:] != -100
        labelled = following & keep & nn.functional.pad(keep, (0, 1))[:, 1:]
    assert rows_of_last_layer == [expected[name] if labelled is None else int(labelled.sum())]


@pytest.mark.parametrize("name", HEADS[:3])
def test_loss_without_logits_is_the_loss_with_them(name: str) -> None:
    model, call = make(name), padded(name) | {"dropout_seed": SEED}
    without, with_logits = run(model, call), run(model, call | {"output_logits": True})
    assert with_logits.keys() - without.keys() == {"prediction_logits" if name == HEADS[1] else "logits"}
    for key, value in without.items():
        torch.testing.assert_close(value, with_logits[key])


@pytest.mark.parametrize("name", HEADS[:2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_positions(name: str, is_packed: bool, rows_of_last_layer: list[int | None]) -> None:
    """In any order, more than once, on padding: as the reference takes them from the padded hidden states."""
    model, call = make(name).eval(), padded(name)
    call.pop("labels")
    keep = keep_mask()
    kept = torch.tensor([30, 2, 2, 31, 0, 12])
    places = torch.cat((kept, torch.tensor([20, 35])))  # the last two are padding
    assert keep.flatten()[kept].all() and not keep.flatten()[places[6:]].any()
    every = getattr(model(**call), "prediction_logits" if name == HEADS[1] else "logits").flatten(0, 1)
    if is_packed:
        call = packed(name, call)
        places, expected = keep.flatten().cumsum(0)[kept] - 1, every[kept]
    else:
        expected = every[places].index_copy(0, torch.tensor([6, 7]), model.cls.predictions(torch.zeros(2, 32)))
    labels = torch.randint(0, 50, (len(places),))
    output = model(**call, masked_lm_positions=places, labels=labels)
    logits = output.prediction_logits if name == HEADS[1] else output.logits
    torch.testing.assert_close(logits, expected)
    loss = nn.functional.cross_entropy(expected, labels)
    if name == HEADS[1]:
        loss = loss + nn.functional.cross_entropy(output.seq_relationship_logits, call["next_sentence_label"])
    torch.testing.assert_close(output.loss, loss)
    needed = {*keep.flatten().nonzero().squeeze(1)[places].tolist()} if is_packed else {*kept.tolist()}
    firsts = {0, 9, 27} if name == HEADS[1] else set()
    assert rows_of_last_layer[-1] == len(needed | firsts)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_nothing_kept_and_nothing_labelled(name: str, is_packed: bool) -> None:
    """A loss of 0 and zero gradients; no row at all is not an error."""
    model, call = make(name), padded(name)
    call["attention_mask"] = call["attention_mask"] & False
    if is_packed:
        call = packed(name, call)
        by_token = [key for key in ("input_ids", "token_type_ids", "labels") if key in call and len(call[key]) > BATCH]
        call |= {key: call[key][:0] for key in by_token}
        call["cu_seqlens"] = torch.zeros_like(call["cu_seqlens"])
    call |= {key: torch.full_like(call[key], 100) for key in ("start_positions", "end_positions") if key in call}
    call |= {key: torch.full_like(call[key], -100) for key in ("labels", "next_sentence_label") if key in call}
    results = run(model, call)
    assert results["loss"] == 0
    assert not any(value.any() for key, value in results.items() if key.startswith("grad"))


# --- arguments of single heads


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])])
def test_logits_to_keep(keep: int | Tensor) -> None:
    model, call = make("BertLMHeadModel").eval(), padded("BertLMHeadModel")
    labels = call.pop("labels")
    every = model(**call).logits
    columns = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
    torch.testing.assert_close(model(**call, logits_to_keep=keep).logits, columns)
    for wrong in (call | {"labels": labels}, packed("BertLMHeadModel", call)):
        with pytest.raises(ValueError, match="logits_to_keep: expected 0 beside labels and for packed input"):
            model(**wrong, logits_to_keep=keep)


def test_a_decoder_sees_no_later_word_and_continues_from_its_cache() -> None:
    model = make("BertLMHeadModel").eval()
    ids = torch.randint(1, 50, (2, 8))
    every = model(ids)
    changed = ids.clone()
    changed[:, 5:] = 3
    assert torch.equal(model(changed).logits[:, :5], every.logits[:, :5])
    first = model(ids[:, :5], logits_to_keep=1)
    torch.testing.assert_close(first.logits, every.logits[:, 4:5])
    second = model(ids[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(second.logits, every.logits[:, 5:])
    assert "past_key_values" not in model(ids, labels=ids) and "past_key_values" not in model(ids, use_cache=False)


def test_language_model_without_a_decoder_is_named() -> None:
    with pytest.warns(UserWarning, match="without config.is_decoder every token sees the next one"):
        make("BertLMHeadModel", is_decoder=False)


def test_old_name_of_next_sentence_labels() -> None:
    model, call = make("BertForNextSentencePrediction").eval(), padded("BertForNextSentencePrediction")
    old = {"next_sentence_label" if key == "labels" else key: value for key, value in call.items()}
    with pytest.warns(FutureWarning, match="next_sentence_label is deprecated, use labels") as caught:
        assert torch.equal(model(**old).loss, model(**call).loss)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="next_sentence_label: expected None beside labels"):
        model(**old, labels=call["labels"])


@pytest.mark.parametrize(
    ("config", "labels", "loss"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0]), nn.functional.mse_loss),
        ({"num_labels": 1}, torch.tensor([[1], [2], [0], [5]]), nn.functional.mse_loss),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(4, 3), nn.functional.mse_loss),
        ({"num_labels": 3}, torch.tensor([2, 0, 1, 1]), nn.functional.cross_entropy),
        ({"num_labels": 3}, torch.tensor([[2], [0], [1], [1]]), nn.functional.cross_entropy),
        ({"num_labels": 3}, torch.rand(4, 3).round(), nn.functional.binary_cross_entropy_with_logits),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.eye(4, 3).long(),
         nn.functional.binary_cross_entropy_with_logits),
    ],
)  # fmt: skip
def test_problem_types(config: dict[str, Any], labels: Tensor, loss: Any) -> None:
    name = "BertForSequenceClassification"
    model, call = make(name, **config).eval(), padded(name) | {"labels": labels}
    output = model(**call)
    expected = labels.flatten() if loss is nn.functional.cross_entropy else labels.view_as(output.logits).float()
    torch.testing.assert_close(output.loss, loss(output.logits, expected))
    assert model.config.problem_type == config.get("problem_type")  # nothing is remembered from one call to the next


TWO = torch.tensor([0, 1])
PLACE = torch.tensor([36])
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "words, shape": ("MaskedLM", {"labels": torch.zeros(4, 8).long()}, r"labels: expected shape \[4, 9\]"),
    "words, dtype": ("MaskedLM", {"labels": torch.zeros(4, 9)}, "labels: expected dtype int64 or int32"),
    "next": ("PreTraining", {"next_sentence_label": TWO}, r"next_sentence_label: expected shape \[4\]"),
    "next, range": ("NextSentencePrediction", {"labels": torch.arange(4)}, r"labels: .* in \[0, 2\), got 3"),
    "class": ("SequenceClassification", {"labels": TWO}, r"labels: expected shape \[4\], got \[2\]"),
    "class, range": ("SequenceClassification", {"labels": torch.arange(4)}, r"class in \[0, 3\), got 3"),
    "classes": ("SequenceClassification", {"labels": torch.ones(4)}, r"labels: expected shape \[4, 3\], got \[4\]"),
    "choice": ("MultipleChoice", {"labels": TWO}, r"labels: expected shape \[4\], got \[2\]"),
    "choices": ("MultipleChoice", {"num_choices": 2}, "num_choices: expected 3, as input_ids has, or None, got 2"),
    "tokens": ("TokenClassification", {"labels": torch.zeros(4).long()}, r"labels: expected shape \[4, 9\]"),
    "start": ("QuestionAnswering", {"start_positions": TWO}, r"start_positions: expected shape \[4\], got \[2\]"),
    "end": ("QuestionAnswering", {"end_positions": torch.zeros(4)}, "end_positions: expected dtype int64 or int32"),
    "places": (
        "MaskedLM",
        {"masked_lm_positions": PLACE, "labels": PLACE},
        r"_positions: .*\[0, 36\), got 36",
    ),
    "words of places": (
        "MaskedLM",
        {"masked_lm_positions": TWO, "labels": PLACE},
        r"labels: expected shape \[2\]",
    ),
    "unknown": ("MaskedLM", {"lables": TWO}, r"BertForMaskedLM.forward\(\) got an unexpected .* 'lables'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_labels_are_named(case: str) -> None:
    name, changes, message = WRONG[case]
    name = f"BertFor{name}"
    with pytest.raises((TypeError, ValueError), match=message):
        make(name)(**padded(name) | changes)


def test_wrong_choices_are_named() -> None:
    model, call = make("BertForMultipleChoice"), padded("BertForMultipleChoice")
    flat = packed("BertForMultipleChoice", call)
    for num_choices in (None, 0, 5):
        with pytest.raises(
            ValueError, match=rf"num_choices: expected a divisor .* \(12\) beside .*, got {num_choices}"
        ):
            model(**flat | {"num_choices": num_choices})
    with pytest.raises(ValueError, match=r"input_ids: expected choices \[B, C, S\], got shape \[4, 9\]"):
        model(input_ids=call["input_ids"][:, 0])
    with pytest.raises(ValueError, match="input_ids, inputs_embeds: expected exactly one of the two, got neither"):
        model(labels=call["labels"])


def test_every_head_has_the_arguments_of_the_model() -> None:
    shared = list(inspect.signature(bert_fast.BertModel.forward).parameters)
    for name in HEADS:
        parameters = inspect.signature(make(name).forward).parameters
        assert list(parameters)[: len(shared) - 1] == shared[1:] and len(parameters) > len(shared) - 1
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())  # tools would take that for "anything"


def test_functions_of_heads_stand_alone() -> None:
    """Fused models of others call them with parts of their own."""
    model, call = make("BertForPreTraining").eval(), padded("BertForPreTraining")
    inputs = {key: call[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    loss, logits, encoded = predict_words(
        model.bert, model.cls.predictions, inputs, None, output_logits=False, pooled=True
    )
    assert loss is None and logits is None and len(encoded.hidden) == 3
    pooled, _ = pooled_sequences(model.bert, inputs)
    torch.testing.assert_close(model.bert.pool(encoded), pooled)
    torch.testing.assert_close(pooled, model.bert(**inputs).pooler_output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model.cls.seq_relationship(pooled), model(**inputs).seq_relationship_logits)
