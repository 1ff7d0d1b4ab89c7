"""Names of the hub in place of paths: from a local cache, and from a server on this machine; no network beyond it."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_fast.errors import CheckpointError
from bert_fast.hub import is_hub_name
from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig
from bert_fast.models.sentence_folder import TextEmbedding
from bert_fast.models.text_embedding import BertForTextEmbedding
from tests.hub_names import NAME, cached, run_beside_hub

Make = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def source(make_hf: Make) -> nn.Module:
    return make_hf("BertModel")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def same(model: nn.Module, source: nn.Module) -> bool:
    theirs = source.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
def test_from_the_cache(source: nn.Module, tmp_path: Path, shard_size: str, offline: None) -> None:
    options = cached(tmp_path, lambda path: source.save_pretrained(path, max_shard_size=shard_size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BertModel.from_pretrained(NAME, **options)
        assert same(BertModel.from_pretrained(NAME, cache_dir=tmp_path), source)  # offline by the environment
    assert same(model, source) and BertConfig.from_pretrained(NAME, **options) == model.config
    lacks = "has this name without config.json or bert_config.json, revision v2, and the hub was not reached"
    with pytest.raises(CheckpointError, match=rf"^{NAME}: no such file or directory; .* {lacks}"):
        BertModel.from_pretrained(NAME, revision="v2", **options)
    cached(tmp_path, lambda path: source.save_pretrained(path), "2" * 40, "v2")
    assert BertModel.from_pretrained(NAME, revision="v2", num_labels=5, **options).config.num_labels == 5


def test_first_format_in_the_cache(source: nn.Module, tmp_path: Path, offline: None) -> None:
    """Where the weights are not safetensors, the other names are tried."""

    def save(path: Path) -> None:
        source.save_pretrained(path)
        (path / "model.safetensors").unlink()
        torch.save(source.state_dict(), path / "pytorch_model.bin")

    assert same(BertModel.from_pretrained(NAME, **cached(tmp_path, save)), source)


@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
def test_subfolders_and_variants_in_the_cache(
    source: nn.Module, tmp_path: Path, shard_size: str, offline: None
) -> None:
    how = {"variant": "fp16", "max_shard_size": shard_size}
    options = cached(tmp_path, lambda path: source.save_pretrained(path / "a" / "b", **how))
    model = BertModel.from_pretrained(NAME, subfolder="a/b", variant="fp16", **options)
    assert same(model, source) and BertConfig.from_pretrained(NAME, subfolder="a/b", **options) == model.config
    with pytest.raises(CheckpointError, match=r"has this name without a/b/model\.safetensors or "):
        BertModel.from_pretrained(NAME, subfolder="a/b", **options)
    with pytest.raises(CheckpointError, match=r"has this name without config\.json or bert_config\.json, and"):
        BertModel.from_pretrained(NAME, **options)


def test_what_is_missing_is_named(source: nn.Module, tmp_path: Path, offline: None) -> None:
    with pytest.raises(CheckpointError, match=r"has nothing of this name, and the hub was not reached \(offline\)"):
        BertModel.from_pretrained(NAME, cache_dir=tmp_path)
    options = cached(tmp_path, lambda path: source.save_pretrained(path, max_shard_size="10KB"))
    shard = next(tmp_path.rglob("model-00002-of-*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"has this name without {shard.name}, and"):
        BertModel.from_pretrained(NAME, **options)
    with pytest.raises(CheckpointError, match=r"^a--b/c: no such file or directory, nor on the hub: "):
        BertModel.from_pretrained("a--b/c", cache_dir=tmp_path)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"^so\S+: no such file or directory; names .*: pip install huggingface_hub$"
    ):
        BertModel.from_pretrained(NAME)


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(map(is_hub_name, ["bert-base-uncased", "google-bert/bert-base-uncased", "a/B.c_d-1"]))
    paths = [
        "",
        ".",
        "/a/b",
        "./a",
        "../a",
        "a/b/c",
        "~/a",
        "a\\b",
        "a/",
        "model.safetensors",
        "a b",
        "a/b.bin",
        "a" * 97,
    ]
    assert not any(map(is_hub_name, paths)) and not is_hub_name(tmp_path / "a")
    (tmp_path / "google-bert" / "bert-base-uncased").mkdir(parents=True)
    assert not is_hub_name("google-bert/bert-base-uncased")  # what is there comes first


def test_downloads_configuration_and_weights_only(source: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    source.save_pretrained(tmp_path / "files", max_shard_size="10KB")
    torch.save(source.state_dict(), tmp_path / "files" / "pytorch_model.bin")
    (tmp_path / "files" / "README.md").write_text("not wanted")
    code = f"""
import torch, warnings
warnings.simplefilter("error")
from bert_fast import BertModel
from bert_fast.errors import CheckpointError
first, again = (BertModel.from_pretrained({NAME!r}, cache_dir={str(tmp_path / "cache")!r}) for _ in range(2))
torch.save(again.state_dict(), {str(tmp_path / "state.bin")!r})
try:
    BertModel.from_pretrained("somebody/else", cache_dir={str(tmp_path / "cache")!r})
except CheckpointError as error:
    print(error)
"""
    printed, asked = run_beside_hub(code, tmp_path / "files")
    assert printed.startswith("somebody/else: no such file or directory, and no model of this name on the hub;")
    loaded = torch.load(tmp_path / "state.bin")
    assert all(torch.equal(value, loaded[key]) for key, value in source.state_dict().items())
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text())
    wanted = {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}
    assert sorted(asked) == sorted(wanted)  # each once, also of two calls


def test_pooling_of_a_name_is_that_of_its_files(source: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    model = BertForTextEmbedding(BertConfig.from_hf(source.config))
    model.text_embedding = TextEmbedding("cls", normalize=True, max_length=9)
    model.save_pretrained(tmp_path / "files")
    config = json.loads((tmp_path / "files" / "config.json").read_text())
    del config["text_embedding"]
    (tmp_path / "files" / "config.json").write_text(json.dumps(config))
    code = f"""
from bert_fast import BertForTextEmbedding
print(BertForTextEmbedding.from_pretrained({NAME!r}, cache_dir={str(tmp_path / "cache")!r}).text_embedding)
"""
    assert run_beside_hub(code, tmp_path / "files")[0] == f"{model.text_embedding}\n"
    (tmp_path / "files" / "modules.json").unlink()
    assert run_beside_hub(code.replace("cache'", "another'"), tmp_path / "files")[0] == f"{TextEmbedding()}\n"
