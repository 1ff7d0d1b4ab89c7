"""Names of the hub in place of paths of tokenizers: from a made-up cache, and from a server on this machine."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_fast import BertTokenizer
from bert_fast.tokenization import XLMRobertaTokenizer, load_tokenizer
from tests.hub_names import NAME, cached, run_beside_hub
from tests.tokenization.test_unigram import state_of

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "Short", "text"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return BertTokenizer(tmp_path / "vocab.txt", do_lower_case=False, model_max_length=77)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_all_files_of_a_tokenizer_in_the_cache_are_read(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    options = cached(tmp_path, tokenizer.save_pretrained)
    for load in (BertTokenizer.from_pretrained, load_tokenizer):
        found = load(NAME, **options)
        assert found("a Short text")["input_ids"] == [2, 5, 6, 7, 3]
        assert (found.model_max_length, found.name_or_path) == (77, NAME)  # of tokenizer_config.json
    options = cached(tmp_path, lambda path: tokenizer.save_pretrained(path / "a" / "b"), "2" * 40)
    assert load_tokenizer(NAME, subfolder="a/b", **options).model_max_length == 77


def test_a_vocabulary_alone_is_a_tokenizer(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.mkdir(parents=True)
        shutil.copy(tmp_path / "vocab.txt", path)

    options = cached(tmp_path, save)
    assert BertTokenizer.from_pretrained(NAME, do_lower_case=False, **options)("Short")["input_ids"] == [2, 6, 3]


def test_a_unigram_tokenizer_is_known_by_its_file(tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text(json.dumps(state_of()))
        (path / "config.json").write_text('{"model_type": "xlm-roberta"}')

    found = load_tokenizer(NAME, **cached(tmp_path, save))
    assert isinstance(found, XLMRobertaTokenizer) and found.identity()[-1] == "exact_scores"


def test_a_subfolder_of_a_directory_is_read(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model" / "tokenizer")
    assert BertTokenizer.from_pretrained(tmp_path / "model", subfolder="tokenizer").model_max_length == 77
    with pytest.raises(FileNotFoundError, match=r"model holds neither tokenizer\.json nor vocab\.txt$"):
        BertTokenizer.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("load", [BertTokenizer.from_pretrained, XLMRobertaTokenizer.from_pretrained, load_tokenizer])
def test_one_line_says_why_there_is_no_tokenizer(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: str) -> str:
        with pytest.raises(FileNotFoundError) as caught:
            load(name, cache_dir=tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert said("./no-folder") == "no-folder: no such file or directory"
    unknown = said(NAME)
    assert f"{NAME}: no such file or directory; the cache of the hub, {tmp_path}, has nothing of this name" in unknown
    assert unknown.endswith("was not reached (offline): run it once with a network, or name a folder")
    cached(tmp_path, lambda path: path.mkdir(parents=True))
    assert "has this name without tokenizer.json or vocab.txt, and the hub was not reached" in said(NAME)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert said(NAME).endswith("need the package huggingface_hub: pip install huggingface_hub")


def test_only_files_of_a_tokenizer_are_downloaded(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    files = tmp_path / "files"
    tokenizer.save_pretrained(files)
    (files / "model.safetensors").write_text("not wanted")
    code = f"""
from bert_fast.tokenization import load_tokenizer
for _ in range(2):
    print(load_tokenizer({NAME!r}, cache_dir={str(tmp_path / "cache")!r}).model_max_length)
try:
    load_tokenizer("somebody/else", cache_dir={str(tmp_path / "cache")!r})
except FileNotFoundError as error:
    print(error)
"""
    printed, asked = run_beside_hub(code, files)
    assert printed.startswith("77\n77\nsomebody/else: no such file or directory, and no model of this name on the hub;")
    assert sorted(asked) == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]  # each once
    (files / "tokenizer.json").unlink()
    (files / "vocab.txt").unlink()
    code = f"""
from bert_fast import BertTokenizer
try:
    BertTokenizer.from_pretrained({NAME!r}, cache_dir={str(tmp_path)!r})
except FileNotFoundError as error:
    print(error)
"""
    printed, _ = run_beside_hub(code, files)
    assert printed == f"{NAME}: expected a repository of the hub with tokenizer.json or vocab.txt, got one without\n"
