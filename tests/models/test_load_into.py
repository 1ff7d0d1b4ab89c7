"""Loading weights into a model: every published spelling of the keys, misfits by name, real weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bert_fast.errors import CheckpointError
from bert_fast.models.checkpoint import find_weights, load_checkpoint, load_into
from bert_fast.models.keys import canonical_key, match_keys

transformers = pytest.importorskip("transformers")

Make = Callable[..., nn.Module]
ARCHITECTURES = [
    "BertModel",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key


def common_equal(model: nn.Module, state: dict[str, Tensor]) -> bool:
    """Whether every base parameter of `model` has its value from `state`."""
    by_name = {canonical_key(key): value for key, value in state.items()}
    base = {canonical_key(key): value for key, value in model.state_dict().items()}
    base = {key: value for key, value in base.items() if key.startswith(("embeddings", "encoder"))}
    return len(base) > 30 and all(torch.equal(value, by_name[key]) for key, value in base.items())


# --- key names


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight"),
        ("embeddings.LayerNorm.beta", "embeddings.LayerNorm.bias"),
        ("module.bert.encoder.layer.0.output.dense.weight", "encoder.layer.0.output.dense.weight"),
        ("_orig_mod.module.bert.pooler.dense.bias", "pooler.dense.bias"),
        ("cls.predictions.transform.LayerNorm.gamma", "cls.predictions.transform.LayerNorm.weight"),
        ("bert.weight", "bert.weight"),
        ("head.gamma", "head.gamma"),
        ("mybert.encoder.x", "mybert.encoder.x"),
        ("bert/embeddings/word_embeddings", "embeddings.word_embeddings.weight"),
        ("bert/embeddings/LayerNorm/beta:0", "embeddings.LayerNorm.bias"),
        ("bert/encoder/layer_11/attention/self/query/kernel", "encoder.layer.11.attention.self.query.weight"),
        ("bert/encoder/layer_0/output/LayerNorm/gamma", "encoder.layer.0.output.LayerNorm.weight"),
        ("cls/predictions/transform/dense/bias", "cls.predictions.transform.dense.bias"),
        ("cls/predictions/output_bias", "cls.predictions.bias"),
        ("cls/seq_relationship/output_weights", "cls.seq_relationship.weight"),
        ("cls/squad/output_weights", "qa_outputs.weight"),
        ("output_weights", "classifier.weight"),
        ("output_bias:0", "classifier.bias"),
    ],
)
def test_canonical_key(key: str, expected: str) -> None:
    assert canonical_key(key) == expected


def test_match_keys_refuses_two_spellings_of_one_parameter() -> None:
    with pytest.raises(ValueError, match=r"'pooler\.dense\.bias' and 'bert\.pooler\.dense\.bias' name the same"):
        match_keys(["pooler.dense.bias", "bert.pooler.dense.bias"], ["pooler.dense.bias"])


def test_second_name_of_a_bias_is_not_unexpected() -> None:
    names = ["cls.predictions.bias", "cls.predictions.decoder.bias"]
    for name in names:
        assert match_keys(names, [name, "extra"]).unexpected == ()
    assert match_keys(names, ["extra"]).unexpected == tuple(names)


# --- loading into a model


@pytest.mark.parametrize("source_name", ARCHITECTURES)
@pytest.mark.parametrize("target_name", ARCHITECTURES)
def test_any_class_into_any_class(make_hf: Make, source_name: str, target_name: str) -> None:
    # One label: the classifier of BertForMultipleChoice always has one output.
    source, target = make_hf(source_name, num_labels=1), make_hf(target_name, num_labels=1)
    state = source.state_dict()
    report = load_into(target, state)
    assert common_equal(target, state)
    theirs, ours = ({canonical_key(key) for key in module.state_dict()} for module in (source, target))
    missing = {canonical_key(key) for key in report.missing}
    assert missing <= ours - theirs
    if not any(name.startswith("cls.predictions") for name in ours):
        assert missing == ours - theirs
    assert {canonical_key(key) for key in report.unexpected} <= theirs - ours
    if source_name == target_name:
        assert_equal(source, target)
        assert report.missing == report.unexpected == ()


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("target_name", ["BertModel", "BertForMaskedLM"])
def test_old_spellings(make_hf: Make, prefix: str, old_names: bool, target_name: str) -> None:
    source = make_hf("BertModel")
    state = {prefix + key: value for key, value in source.state_dict().items()}
    state[prefix + "embeddings.position_ids"] = torch.arange(12).unsqueeze(0)
    state[prefix + "embeddings.token_type_ids"] = torch.zeros(1, 12, dtype=torch.int64)
    if old_names:
        state = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in state.items()
        }
    target = make_hf(target_name)
    report = load_into(target, state)
    assert common_equal(target, source.state_dict())
    unused = [f"{prefix}pooler.dense.{name}" for name in ("weight", "bias")]
    assert sorted(report.unexpected) == ([] if target_name == "BertModel" else sorted(unused))
    assert all(key.startswith("cls.predictions") for key in report.missing)


@pytest.mark.parametrize("dropped", ["decoder", "bias", "embeddings", None])
def test_tied_parameters_under_either_name(make_hf: Make, dropped: str | None) -> None:
    source = make_hf("BertForMaskedLM")
    state = source.state_dict()
    drop = {
        "decoder": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
        "bias": ["cls.predictions.bias"],
        "embeddings": ["bert.embeddings.word_embeddings.weight"],
        None: [],
    }[dropped]
    kept = {key: value.clone() for key, value in state.items() if key not in drop}
    target = make_hf("BertForMaskedLM")
    report = load_into(target, kept, strict=True)
    assert report.missing == report.unexpected == ()
    assert_equal(source, target)
    assert target.cls.predictions.decoder.weight is target.bert.embeddings.word_embeddings.weight
    base = make_hf("BertModel")
    load_into(base, kept)
    assert common_equal(base, state)


def test_missing_tied_parameter_is_named_once(make_hf: Make) -> None:
    report = load_into(make_hf("BertForMaskedLM"), make_hf("BertModel").state_dict())
    assert [key for key in report.missing if key.endswith("predictions.bias") or "decoder" in key] == [
        "cls.predictions.bias"
    ]


def test_untied_model(make_hf: Make) -> None:
    source = make_hf("BertForMaskedLM", tie_word_embeddings=False)
    target = make_hf("BertForMaskedLM", tie_word_embeddings=False)
    load_into(target, source.state_dict(), strict=True)
    assert_equal(source, target)
    tied = make_hf("BertForMaskedLM")
    before = {key: value.clone() for key, value in tied.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"differ, but the model ties them .*tie_word_embeddings=False"):
        load_into(tied, source.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in tied.state_dict().items())
    state = {key: value for key, value in source.state_dict().items() if "decoder" not in key}
    report = load_into(target, state)
    assert report.missing == ("cls.predictions.decoder.weight",)  # not silently that of the embeddings


def _tensorflow_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as Google's TensorFlow code names and turns it."""
    variables = {}
    for key, value in state.items():
        if key.startswith("cls.predictions.decoder"):
            continue  # the word table once more, and a second name of the bias
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        key = key.replace("cls.predictions.bias", "cls.predictions.output_bias")
        key = key.replace("seq_relationship.weight", "seq_relationship.output_weights")
        key = key.replace("seq_relationship.bias", "seq_relationship.output_bias")
        key = key.replace("embeddings.weight", "embeddings").replace("layer.", "layer_").replace(".", "/")
        if key.endswith("/weight"):
            key, value = key.removesuffix("weight") + "kernel", value.t().contiguous()
        variables[key] = value
    return variables


def test_tensorflow_names(make_hf: Make) -> None:
    source, target = make_hf("BertForPreTraining"), make_hf("BertForPreTraining")
    variables = _tensorflow_names(source.state_dict())
    assert "bert/encoder/layer_0/attention/self/query/kernel" in variables
    optimizer = {f"{key}/adam_{slot}": value for key, value in variables.items() for slot in "mv"}
    optimizer["global_step"] = torch.tensor(7)
    report = load_into(target, variables | optimizer, strict=True)
    assert report.missing == report.unexpected == ()
    assert_equal(source, target)


def test_every_misshaped_key_is_listed_and_nothing_is_changed(make_hf: Make) -> None:
    model = make_hf("BertForSequenceClassification", num_labels=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = make_hf("BertForSequenceClassification", num_labels=5, vocab_size=40).state_dict()
    with pytest.raises(CheckpointError) as caught:
        load_into(model, state, source="weights.bin")
    message = str(caught.value)
    assert message.startswith("weights.bin: does not fit BertForSequenceClassification:")
    assert "bert.embeddings.word_embeddings.weight: expected [31, 16], got [40, 16]" in message
    assert "classifier.weight: expected [3, 16], got [5, 16]" in message
    assert "classifier.bias: expected [3], got [5]" in message
    assert message.count("\n") == 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    report = load_into(model, state, ignore_mismatched_sizes=True)
    assert [mismatch.name for mismatch in report.mismatched] == [
        "bert.embeddings.word_embeddings.weight",
        "classifier.weight",
        "classifier.bias",
    ]
    assert torch.equal(model.classifier.weight, before["classifier.weight"])
    assert torch.equal(model.bert.pooler.dense.weight, state["bert.pooler.dense.weight"])


def test_other_reasons_to_refuse(make_hf: Make) -> None:
    model = make_hf("BertModel")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"x\.bin: no key fits BertModel, .*holds transformer\.wte; .*emb"):
        load_into(model, {"transformer.wte": torch.zeros(2)}, source="x.bin")
    with pytest.raises(CheckpointError, match=r"no key fits BertModel, .* the file holds nothing"):
        load_into(model, {})
    roberta = {f"roberta.{key}": value for key, value in model.state_dict().items()} | {
        "pooler.dense.bias": torch.ones(16)
    }
    with pytest.raises(CheckpointError, match=r"no key fits BertModel, .* the file holds roberta\.embeddings\."):
        load_into(model, roberta)  # what fits is not an encoder
    quantised = {key: value.to(torch.int8) for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="expected floating-point values, got int8"):
        load_into(model, quantised)
    state = dict(make_hf("BertForPreTraining").state_dict())
    del state["bert.pooler.dense.bias"]
    with pytest.raises(CheckpointError, match=r"exactly: missing pooler\.dense\.bias; unexpected cls\.predictions"):
        load_into(model, state, strict=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.device("meta"):
        empty = make_hf("BertModel")
    with pytest.raises(ValueError, match="meta device"):
        load_into(empty, state)


def _without_values(value: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(value.shape)


# Of the last layer's output: all that comes before it would be written first.
UNUSABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (Tensor.to_sparse, "expected a dense tensor, got a tensor of layout sparse_coo"),
    "sparse rows": (Tensor.to_sparse_csr, "expected a dense tensor, got a tensor of layout sparse_csr"),
    "nested": (lambda v: torch.nested.nested_tensor(list(v)), "expected a dense tensor, got a nested tensor"),
    "meta": (lambda v: v.to("meta"), "expected a dense tensor, got a tensor without values"),
    "fake": (_without_values, "expected a dense tensor, got a tensor without values"),
    "complex": (lambda v: v.to(torch.complex64), "expected floating-point values, got complex64"),
    "quantised": (
        lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8),
        "expected floating-point values, got qint8",
    ),
    "four bits": (
        lambda v: torch.zeros(v.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "expected values that become float32, got float4",
    ),
    "shape": (lambda v: v[1:], r"expected \[16, 24\], got \[15, 24\]"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", UNUSABLE)
def test_nothing_is_written_where_one_value_is_unusable(make_hf: Make, kind: str) -> None:
    spoil, message = UNUSABLE[kind]
    model, name = make_hf("BertModel"), "encoder.layer.1.output.dense.weight"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = dict(make_hf("BertModel").state_dict())
    state[name] = spoil(state[name])
    with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
        load_into(model, state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = load_into(model, state, ignore_mismatched_sizes=True)
    assert [mismatch.name for mismatch in report.mismatched] == [name]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param([], "state_dict: expected a mapping from names to tensors, got list", id="list"),
        pytest.param({3: torch.ones(1)}, "state_dict: expected names as keys, got 3", id="number as a key"),
        pytest.param({"x": None}, r"state_dict\['x'\]: expected a Tensor, got NoneType", id="None as a value"),
    ],
)
def test_states_that_are_none(make_hf: Make, state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        load_into(make_hf("BertModel"), state)


def test_values_in_the_memory_of_the_model(make_hf: Make) -> None:
    model = make_hf("BertModel")
    query, key, value = (f"encoder.layer.1.attention.self.{name}.weight" for name in ("query", "key", "value"))
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    load_into(model, {**state, query: state[key], key: state[query], value: state[value].t()})
    after = model.state_dict()
    assert torch.equal(after[query], before[key]) and torch.equal(after[key], before[query])
    assert torch.equal(after[value], before[value].t())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_models_are_refused(make_hf: Make) -> None:
    quantised = torch.ao.quantization.quantize_dynamic(make_hf("BertModel"), {nn.Linear})
    with pytest.raises(ValueError, match=r"model: expected a state of tensors alone, got \w+ as encoder\.layer\.0\."):
        load_into(quantised, make_hf("BertModel").state_dict())


def test_values_are_cast_to_the_dtype_of_the_model(make_hf: Make) -> None:
    source = make_hf("BertModel")
    target = make_hf("BertModel").to(torch.bfloat16)
    load_into(target, source.state_dict())
    assert torch.equal(target.pooler.dense.weight, source.pooler.dense.weight.to(torch.bfloat16))
    half = {key: value.half() for key, value in source.state_dict().items()}
    target = make_hf("BertModel")
    load_into(target, half)
    assert target.pooler.dense.weight.dtype is torch.float32
    assert torch.equal(target.pooler.dense.weight, source.pooler.dense.weight.half().float())


def test_parameters_keep_their_identity(make_hf: Make) -> None:
    """An optimizer made before loading must see the loaded values."""
    model = make_hf("BertForMaskedLM")
    parameters, pointers = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    load_into(model, make_hf("BertForMaskedLM").state_dict())
    assert all(a is b and a.data_ptr() == p for a, b, p in zip(model.parameters(), parameters, pointers, strict=True))
    assert all(p.requires_grad for p in parameters)


# --- real weights, and what transformers writes


def test_real_minilm(minilm_dir: Path) -> None:
    state = load_checkpoint(minilm_dir)
    assert set(state) >= {"embeddings.word_embeddings.weight", "encoder.layer.5.output.LayerNorm.bias"}
    config = transformers.BertConfig.from_pretrained(minilm_dir)
    model, loaded = transformers.BertModel(config), transformers.BertModel.from_pretrained(minilm_dir)
    report = load_into(model, state, strict=True)
    assert report.missing == report.unexpected == ()
    assert_equal(model, loaded)
    masked = transformers.BertForMaskedLM(config)
    report = load_into(masked, state)
    assert torch.equal(masked.cls.predictions.decoder.weight, state["embeddings.word_embeddings.weight"])
    assert sorted(report.unexpected) == ["pooler.dense.bias", "pooler.dense.weight"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shard_size", ["50GB", "5KB"])
def test_opens_what_transformers_saves(make_hf: Make, tmp_path: Path, architecture: str, shard_size: str) -> None:
    source, target = make_hf(architecture), make_hf(architecture)
    source.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert find_weights(tmp_path).name.endswith(".index.json") == (shard_size == "5KB")
    load_into(target, load_checkpoint(tmp_path), strict=True)
    assert_equal(source, target)
