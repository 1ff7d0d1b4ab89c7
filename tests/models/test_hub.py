"""Names of the hub in place of paths: from a local cache, and from a server on this machine; no network beyond it."""

import http.server
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast.errors import CheckpointError
from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig
from bert_fast.models.hub import is_hub_name

Make = Callable[..., nn.Module]
COMMIT = "1" * 40
NAME = "somebody/a-small-bert"


@pytest.fixture(scope="module")
def source(make_hf: Make) -> nn.Module:
    return make_hf("BertModel")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def cached(cache: Path, save: Callable[[Path], Any], commit: str = COMMIT, revision: str = "main") -> dict[str, Any]:
    """A cache that holds one revision of the repository, written by `save`; the arguments that find it."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    save(repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return {"cache_dir": cache, "local_files_only": True}


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
    with pytest.raises(CheckpointError, match=rf"^{NAME}: no such file or directory, and the hub gave no file:"):
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
    with pytest.raises(CheckpointError, match=r"the hub gave no file:\n  model\.safetensors: "):
        BertModel.from_pretrained(NAME, subfolder="a/b", **options)
    with pytest.raises(CheckpointError, match=r"the hub gave no file:\n  config\.json: "):
        BertModel.from_pretrained(NAME, **options)


def test_what_is_missing_is_named(source: nn.Module, tmp_path: Path, offline: None) -> None:
    with pytest.raises(CheckpointError, match=r"the hub gave no file:\n  config\.json: .*\n  bert_config\.json: "):
        BertModel.from_pretrained(NAME, cache_dir=tmp_path)
    options = cached(tmp_path, lambda path: source.save_pretrained(path, max_shard_size="10KB"))
    shard = next(tmp_path.rglob("model-00002-of-*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"the hub gave no file:\n  {shard.name}: "):
        BertModel.from_pretrained(NAME, **options)
    with pytest.raises(CheckpointError, match=r"^a--b/c: no such file or directory, nor on the hub: "):
        BertModel.from_pretrained("a--b/c", cache_dir=tmp_path)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"no such file or directory \(names .* need the package huggingface_hub"):
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


class _Hub(http.server.BaseHTTPRequestHandler):
    """Just enough of the hub's protocol: files of one directory, by name and revision."""

    directory: Path
    asked: list[str]

    def _send(self, with_body: bool) -> None:
        prefix = f"/{NAME}/resolve/main/"
        path = self.directory / self.path.removeprefix(prefix)
        found = self.path.startswith(prefix) and path.is_file()
        body = path.read_bytes() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{path.name}-{len(body)}"')
        self.send_header("Content-Length", str(len(body)))
        if not found:
            is_ours = self.path.startswith(f"/{NAME}/")
            self.send_header("X-Error-Code", "EntryNotFound" if is_ours else "RepoNotFound")
        self.end_headers()
        if with_body and found:
            self.asked.append(path.name)
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._send(False)

    def do_GET(self) -> None:
        self._send(True)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, type[_Hub]]]:
    handler = type("Handler", (_Hub,), {"directory": tmp_path / "files", "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_address[1]}", handler
        http_server.shutdown()


def test_downloads_configuration_and_weights_only(
    source: nn.Module, tmp_path: Path, server: tuple[str, type[_Hub]]
) -> None:
    pytest.importorskip("huggingface_hub")
    endpoint, handler = server
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
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "PATH": "", "NO_PROXY": "*"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("somebody/else: no such file or directory, nor on the hub: ")
    loaded = torch.load(tmp_path / "state.bin")
    assert all(torch.equal(value, loaded[key]) for key, value in source.state_dict().items())
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text())
    wanted = {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}
    assert sorted(handler.asked) == sorted(wanted)  # each once, also of two calls
