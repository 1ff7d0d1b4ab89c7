"""Tokenizers under test, with both engines, and Hugging Face's beside them."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_fast import native
from bert_fast.reference.wordpiece import WordPiece
from bert_fast.tokenization import BertTokenizer, engine

VOCABULARIES = ("bert-base-uncased", "bert-base-cased", "bert-base-chinese", "bert-base-multilingual-cased")


@pytest.fixture(params=["reference", "native"])
def use_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tokenizers made in this test use the pure-Python engine, then those of a second run the C++ one."""
    implementation = WordPiece
    if request.param == "native":
        implementation = getattr(native.load(), "WordPiece", None)
        if implementation is None:
            pytest.skip(f"no C++ tokenizer: {native.unavailable_reason()}")
    monkeypatch.setattr(engine, "_implementation", lambda: implementation)
    return str(request.param)


@pytest.fixture
def ours(shared_data: Path, use_engine: str) -> Callable[..., BertTokenizer]:
    """Makes our tokenizer of a named vocabulary; options as those of the constructor."""

    def make(vocabulary: str = "bert-base-uncased", **options: Any) -> BertTokenizer:
        return _cached(shared_data, use_engine, vocabulary, tuple(sorted(options.items())))

    return make


@pytest.fixture
def theirs(shared_data: Path) -> Callable[..., Any]:
    """Makes the tokenizer of transformers 5; options as those of its constructor."""
    if int(pytest.importorskip("transformers").__version__.split(".")[0]) < 5:
        pytest.skip("what is matched is transformers 5; 4 decodes and names added tokens in another way")

    def make(vocabulary: str = "bert-base-uncased", **options: Any) -> Any:
        return _cached_transformers(shared_data, vocabulary, tuple(sorted(options.items())))

    return make


@functools.cache
def _cached(data: Path, engine_name: str, vocabulary: str, options: tuple[tuple[str, Any], ...]) -> BertTokenizer:
    return BertTokenizer(data / "vocab" / vocabulary / "vocab.txt", **dict(options))


@functools.cache
def _cached_transformers(data: Path, vocabulary: str, options: tuple[tuple[str, Any], ...]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertTokenizerFast.from_pretrained(str(data / "vocab" / vocabulary), **dict(options))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
