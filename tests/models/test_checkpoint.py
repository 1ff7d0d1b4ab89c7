"""Reading checkpoint files and loading them into a model: every published spelling, every broken file by name."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bert_fast.errors import CheckpointError
from bert_fast.models.checkpoint import find_weights, load_checkpoint, load_into, load_state_dict_file
from bert_fast.models.keys import canonical_key, match_keys

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
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


def make(name: str = "BertForPreTraining", **config: Any) -> nn.Module:
    """One of transformers' models with every parameter random: zeros and ones would hide a value left at its start."""
    model = getattr(transformers, name)(transformers.BertConfig(**{**SIZES, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


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
    ],
)
def test_canonical_key(key: str, expected: str) -> None:
    assert canonical_key(key) == expected


def test_match_keys_refuses_two_spellings_of_one_parameter() -> None:
    with pytest.raises(ValueError, match=r"'pooler\.dense\.bias' and 'bert\.pooler\.dense\.bias' name the same"):
        match_keys(["pooler.dense.bias", "bert.pooler.dense.bias"], ["pooler.dense.bias"])


# --- loading into a model


@pytest.mark.parametrize("source_name", ARCHITECTURES)
@pytest.mark.parametrize("target_name", ARCHITECTURES)
def test_any_class_into_any_class(source_name: str, target_name: str) -> None:
    # One label: the classifier of BertForMultipleChoice always has one output.
    source, target = make(source_name, num_labels=1), make(target_name, num_labels=1)
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
def test_old_spellings(prefix: str, old_names: bool, target_name: str) -> None:
    source = make("BertModel")
    state = {prefix + key: value for key, value in source.state_dict().items()}
    state[prefix + "embeddings.position_ids"] = torch.arange(12).unsqueeze(0)
    state[prefix + "embeddings.token_type_ids"] = torch.zeros(1, 12, dtype=torch.int64)
    if old_names:
        state = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in state.items()
        }
    target = make(target_name)
    report = load_into(target, state)
    assert common_equal(target, source.state_dict())
    unused = [f"{prefix}pooler.dense.{name}" for name in ("weight", "bias")]
    assert sorted(report.unexpected) == ([] if target_name == "BertModel" else sorted(unused))
    assert all(key.startswith("cls.predictions") for key in report.missing)


@pytest.mark.parametrize("dropped", ["decoder", "bias", "embeddings", None])
def test_tied_parameters_under_either_name(dropped: str | None) -> None:
    source = make("BertForMaskedLM")
    state = source.state_dict()
    drop = {
        "decoder": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
        "bias": ["cls.predictions.bias"],
        "embeddings": ["bert.embeddings.word_embeddings.weight"],
        None: [],
    }[dropped]
    kept = {key: value.clone() for key, value in state.items() if key not in drop}
    target = make("BertForMaskedLM")
    report = load_into(target, kept, strict=True)
    assert report.missing == report.unexpected == ()
    assert_equal(source, target)
    assert target.cls.predictions.decoder.weight is target.bert.embeddings.word_embeddings.weight
    base = make("BertModel")
    load_into(base, kept)
    assert common_equal(base, state)


def test_missing_tied_parameter_is_named_once() -> None:
    report = load_into(make("BertForMaskedLM"), make("BertModel").state_dict())
    assert [key for key in report.missing if key.endswith("predictions.bias") or "decoder" in key] == [
        "cls.predictions.bias"
    ]


def test_untied_model() -> None:
    source = make("BertForMaskedLM", tie_word_embeddings=False)
    target = make("BertForMaskedLM", tie_word_embeddings=False)
    load_into(target, source.state_dict(), strict=True)
    assert_equal(source, target)
    tied = make("BertForMaskedLM")
    before = {key: value.clone() for key, value in tied.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"differ, but the model ties them .*tie_word_embeddings=False"):
        load_into(tied, source.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in tied.state_dict().items())
    state = {key: value for key, value in source.state_dict().items() if "decoder" not in key}
    report = load_into(target, state)
    assert report.missing == ("cls.predictions.decoder.weight",)  # not silently that of the embeddings


def test_every_misshaped_key_is_listed_and_nothing_is_changed() -> None:
    model = make("BertForSequenceClassification", num_labels=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = make("BertForSequenceClassification", num_labels=5, vocab_size=40).state_dict()
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


def test_other_reasons_to_refuse() -> None:
    model = make("BertModel")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"x\.bin: no key fits BertModel; the file holds transformer\.wte; .*emb"):
        load_into(model, {"transformer.wte": torch.zeros(2)}, source="x.bin")
    with pytest.raises(CheckpointError, match="no key fits BertModel; the file holds nothing"):
        load_into(model, {})
    quantised = {key: value.to(torch.int8) for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="expected floating-point values, got int8"):
        load_into(model, quantised)
    state = dict(make("BertForPreTraining").state_dict())
    del state["bert.pooler.dense.bias"]
    with pytest.raises(CheckpointError, match=r"exactly: missing pooler\.dense\.bias; unexpected cls\.predictions"):
        load_into(model, state, strict=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.device("meta"):
        empty = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pytest.raises(ValueError, match="meta device"):
        load_into(empty, state)


def test_values_are_cast_to_the_dtype_of_the_model() -> None:
    source = make("BertModel")
    target = make("BertModel").to(torch.bfloat16)
    load_into(target, source.state_dict())
    assert torch.equal(target.pooler.dense.weight, source.pooler.dense.weight.to(torch.bfloat16))
    half = {key: value.half() for key, value in source.state_dict().items()}
    target = make("BertModel")
    load_into(target, half)
    assert target.pooler.dense.weight.dtype is torch.float32
    assert torch.equal(target.pooler.dense.weight, source.pooler.dense.weight.half().float())


def test_parameters_keep_their_identity() -> None:
    """An optimizer made before loading must see the loaded values."""
    model = make("BertForMaskedLM")
    parameters, pointers = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    load_into(model, make("BertForMaskedLM").state_dict())
    assert all(a is b and a.data_ptr() == p for a, b, p in zip(model.parameters(), parameters, pointers, strict=True))
    assert all(p.requires_grad for p in parameters)


# --- files


def _save_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save(state, directory / "pytorch_model.bin")


def _save_old_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _save_nested_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save({"model": state, "epoch": 3, "optimizer": {"lr": 0.1}}, directory / "pytorch_model.bin")


def _save_parameters_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save({key: nn.Parameter(value) for key, value in state.items()}, directory / "pytorch_model.bin")


def _save_safetensors(state: dict[str, Tensor], directory: Path) -> None:
    save_file(state, directory / "model.safetensors")


def _save_sharded(state: dict[str, Tensor], directory: Path, name: str, save: Callable[[Any, Path], Any]) -> None:
    keys = sorted(state)
    stem, suffix = name.split(".")
    weight_map = {}
    for i in range(3):
        file_name = f"{stem}-{i + 1:05}-of-00003.{suffix}"
        save({key: state[key] for key in keys[i::3]}, directory / file_name)
        weight_map |= dict.fromkeys(keys[i::3], file_name)
    (directory / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _save_sharded_safetensors(state: dict[str, Tensor], directory: Path) -> None:
    _save_sharded(state, directory, "model.safetensors", save_file)


def _save_sharded_bin(state: dict[str, Tensor], directory: Path) -> None:
    _save_sharded(state, directory, "pytorch_model.bin", torch.save)


WRITERS = [
    _save_safetensors,
    _save_sharded_safetensors,
    _save_bin,
    _save_old_bin,
    _save_nested_bin,
    _save_parameters_bin,
    _save_sharded_bin,
]


@pytest.mark.parametrize("save", WRITERS)
def test_formats(tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None]) -> None:
    state = make("BertModel").state_dict()
    save(state, tmp_path)
    weights = find_weights(tmp_path)
    for loaded in (load_checkpoint(tmp_path), load_checkpoint(weights)):
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in state.items())
    half = load_checkpoint(tmp_path, dtype=torch.float16)
    assert all(torch.equal(half[key], value.half()) for key, value in state.items())


def test_dtype_leaves_integers_alone(tmp_path: Path) -> None:
    save_file({"embeddings.position_ids": torch.arange(3), "x": torch.ones(1)}, tmp_path / "model.safetensors")
    loaded = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert loaded["embeddings.position_ids"].dtype is torch.int64 and loaded["x"].dtype is torch.bfloat16


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    _save_bin({"x": torch.zeros(1)}, tmp_path)
    _save_safetensors({"x": torch.ones(1)}, tmp_path)
    assert load_checkpoint(tmp_path)["x"] == 1


class _Bomb:
    """A pickle that would make a directory if its code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain_pickle", [False, True])
def test_pickles_with_code_are_refused(tmp_path: Path, plain_pickle: bool) -> None:
    path, crater = tmp_path / "pytorch_model.bin", tmp_path / "crater"
    content = {"x": 1.0, "y": _Bomb(crater)}
    if plain_pickle:
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused, because .*mkdir"):
        load_checkpoint(tmp_path)
    assert not crater.exists()


@pytest.mark.parametrize("save", [_save_safetensors, _save_bin, _save_old_bin])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_files(tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None], share: float) -> None:
    save(make("BertModel").state_dict(), tmp_path)
    path = find_weights(tmp_path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(
        CheckpointError, match="the file is empty" if share == 0.0 else "truncated or corrupt"
    ) as caught:
        load_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 100, "truncated or corrupt"),
        (b"\xff" * 100, "truncated or corrupt"),
        (b"<html>404: not found</html>" * 10, "truncated or corrupt"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "Git LFS pointer"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "expected a dictionary of tensors, got list"),
        (torch.ones(1), "expected a dictionary of tensors, got Tensor"),
        ({"a": torch.ones(1), "lr": 0.1}, "these are none: lr"),
        ({3: torch.ones(1)}, "these are none: 3"),
    ],
)
def test_torch_files_without_weights(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, .*pytorch_model\.bin\.index\.json$"):
        load_checkpoint(tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tf_model\.h5: the format of another framework"):
        load_checkpoint(tmp_path)
    for load in (load_checkpoint, load_state_dict_file):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state_dict_file(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize("save", [_save_sharded_safetensors, _save_sharded_bin])
def test_broken_shards(tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None]) -> None:
    save(make("BertModel").state_dict(), tmp_path)
    index_path = find_weights(tmp_path)
    shard = next(tmp_path.glob("*-00002-of-*"))
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lists files that are not there: {shard.name}"):
        load_checkpoint(tmp_path)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{shard.name}: not a complete"):
        load_checkpoint(tmp_path)
    shutil.copy(next(tmp_path.glob("*-00001-of-*")), shard)
    with pytest.raises(CheckpointError, match=r"lists keys that their files do not hold: .*-00002-of-") as caught:
        load_checkpoint(tmp_path)
    assert str(index_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ('{"weight_map": {', "cannot be read as JSON"),
        ("[]", "expected an object with a non-empty 'weight_map'"),
        ("{}", "expected an object with a non-empty 'weight_map'"),
        ('{"weight_map": ["a"]}', "expected an object with a non-empty 'weight_map'"),
        ('{"weight_map": {"a": 3}}', r"weight_map\['a'\]: expected a file name, got 3"),
        ('{"weight_map": {"a": "../x.bin"}}', r"expected a file name, got '\.\./x\.bin'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "expected a file name, got '/etc/passwd'"),
        ('{"weight_map": {"a": ""}}', "expected a file name, got ''"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_every_single_byte_flip_of_a_header_is_an_error_or_readable(tmp_path: Path) -> None:
    """Damage is never anything but a CheckpointError (or goes unnoticed where it hits a value)."""
    state = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}
    for name, save in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
        path = tmp_path / name
        save(state, path)
        content = path.read_bytes()
        errors = 0
        for position in range(0, len(content), 1 if len(content) < 500 else 7):
            path.write_bytes(content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :])
            try:
                load_state_dict_file(path)
            except CheckpointError:
                errors += 1
        assert errors > 20
        path.write_bytes(content)


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
def test_opens_what_transformers_saves(tmp_path: Path, architecture: str, shard_size: str) -> None:
    source, target = make(architecture), make(architecture)
    source.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert find_weights(tmp_path).name.endswith(".index.json") == (shard_size == "5KB")
    load_into(target, load_checkpoint(tmp_path), strict=True)
    assert_equal(source, target)


def test_files_stay_as_they_were(tmp_path: Path) -> None:
    _save_safetensors(make("BertModel").state_dict(), tmp_path)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    state = load_checkpoint(tmp_path)
    for value in state.values():
        value.fill_(7)
    assert path.read_bytes() == before
    assert load_file(path)["pooler.dense.bias"][0] != 7
