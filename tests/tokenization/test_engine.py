"""Which implementation a tokenizer gets."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from bert_fast import native
from bert_fast.reference.wordpiece import WordPiece
from bert_fast.tokenization import engine

VOCAB = ["[UNK]", "a"]


def test_the_native_core_where_it_is_built() -> None:
    core = getattr(native.load(), "WordPiece", None)
    if core is None:
        pytest.skip(f"no C++ tokenizer: {native.unavailable_reason()}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(engine.make_engine(VOCAB), core)


def test_the_reference_otherwise_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "not built on purpose")
    engine._implementation.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="a slow one in pure Python takes its place.*not built on purpose"):
            assert isinstance(engine.make_engine(VOCAB), WordPiece)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.make_engine(VOCAB)
    finally:
        engine._implementation.cache_clear()


def test_it_needs_nothing_of_hugging_face() -> None:
    root = Path(__file__).resolve().parents[2]
    code = """
import sys
from bert_fast.tokenization import BertTokenizer
tokenizer = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
assert tokenizer(["a", "a a"], padding=True, return_tensors="np")["input_ids"].tolist() == [[2, 5, 3, 0], [2, 5, 5, 3]]
assert not {"transformers", "tokenizers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
