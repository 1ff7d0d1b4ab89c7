"""Sizes that a configuration asks for, compared with the weights and with the machine before anything is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bert_fast import BertForMaskedLM, BertForSequenceClassification
from bert_fast.errors import CheckpointError
from bert_fast.models import shapes
from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig
from bert_fast.models.shapes import encoder_shapes

from .conftest import SIZES

Make = Callable[..., nn.Module]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="encoder"),
        pytest.param({"num_hidden_layers": 0}, id="no layers"),
        pytest.param({"position_embedding_type": "relative_key"}, id="relative positions"),
        pytest.param({"is_decoder": True, "add_cross_attention": True, "pruned_heads": {1: [0, 2]}}, id="decoder"),
    ],
)
def test_shapes_are_those_of_the_model(values: dict[str, Any]) -> None:
    config = BertConfig(**{**SIZES, **values})
    state = BertModel(config, add_pooling_layer=False).state_dict()
    assert dict(encoder_shapes(config)) == {name: tuple(value.shape) for name, value in state.items()}


def rewrite(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


FORMATS = ["one file", "shards", "pickle"]
ABSURD = {
    "layers": (
        {"num_hidden_layers": 20_000},
        "num_hidden_layers: expected no more layers than the file's .* got 20000",
    ),
    "words": ({"vocab_size": 2 * 10**7}, r"word_embeddings\.weight: expected \[20000000, 16\], got \[31, 16\]"),
    "positions": ({"max_position_embeddings": 10**9}, r"position_embeddings\.weight: expected \[1000000000, 16\], got"),
    "types": ({"type_vocab_size": 10**9}, r"token_type_embeddings\.weight: expected \[1000000000, 16\], got"),
    "width": ({"hidden_size": 2**20}, r"layer\.1\.output\.LayerNorm\.bias: expected \[1048576\], got \[16\]"),
    "inner width": ({"intermediate_size": 10**9}, r"layer\.0\.intermediate\.dense\.bias: expected \[1000000000\], got"),
    "labels": (
        {"num_labels": 10**9, "id2label": None, "label2id": None},
        "num_labels: expected at most 1048576 classes",
    ),
}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_built(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, format_: str
) -> None:
    make_hf("BertForSequenceClassification").save_pretrained(
        tmp_path, max_shard_size="5KB" if format_ == "shards" else "1GB"
    )
    if format_ == "pickle":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    values, message = ABSURD[name]
    rewrite(tmp_path, **values)

    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(nn.Module, "__init__", build)
    with pytest.raises(CheckpointError, match=message) as caught:
        BertForSequenceClassification.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
    if name == "layers":
        with pytest.raises(CheckpointError, match=message):
            BertForSequenceClassification.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_what_may_be_new_stays_possible(make_hf: Make, tmp_path: Path) -> None:
    """Heads, a few layers, cross-attention; and weights that are spelled in another way."""
    make_hf("BertModel").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"initial values: classifier\.weight"):
        model = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=1000)
    assert model.classifier.out_features == 1000
    with pytest.warns(UserWarning, match=r"initial values: encoder\.layer\.2\.attention"):
        assert len(BertModel.from_pretrained(tmp_path, num_hidden_layers=4).encoder.layer) == 4
    with pytest.warns(UserWarning, match=r"initial values: encoder\.layer\.0\.crossattention"):
        BertModel.from_pretrained(tmp_path, is_decoder=True, add_cross_attention=True)
    with pytest.warns(UserWarning, match=r"of another shape, .*word_embeddings\.weight: expected \[40, 16\]"):
        BertForMaskedLM.from_pretrained(tmp_path, vocab_size=40, ignore_mismatched_sizes=True)
    state = {f"module.bert.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"embeddings\.LayerNorm\.weight: expected \[8\], got \[16\]"):
        BertModel.from_pretrained(tmp_path, hidden_size=8)


def test_models_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_physical_memory", lambda: 2**30)
    for values in ({"vocab_size": 2 * 10**7}, {"num_hidden_layers": 10**5}, {"intermediate_size": 10**9}):
        config = BertConfig(**{**SIZES, **values})
        name, value = next(iter(values.items()))
        with pytest.raises(
            ValueError, match=rf"config: expected a model of at most 1 GiB, the memory, .*{name}={value}"
        ):
            BertForMaskedLM(config)
    with torch.device("meta"):
        assert BertModel(BertConfig(**{**SIZES, "vocab_size": 2 * 10**7})).embeddings.word_embeddings.weight.is_meta
        with pytest.raises(ValueError, match="config: expected a model of at most"):
            BertModel(BertConfig(**{**SIZES, "hidden_size": 2**30, "intermediate_size": 2**31 - 1}))
