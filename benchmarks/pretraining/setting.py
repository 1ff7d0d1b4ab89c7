"""What all runs here have in common: texts, vocabulary, the small model."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kit.record import DATA, ROOT
from benchmarks.recipes.data import PREPARED, books_vocabulary
from bert_fast import BertConfig, BertTokenizer
from bert_fast.data import TokenStore, tokenize_files

TRAIN, VALID = (DATA / "pretrain_en" / f"books_{part}.txt" for part in ("train", "valid"))
MODEL = ROOT / "examples" / "books_model.json"


def tokenizer() -> BertTokenizer:
    """With the vocabulary of the recipe, which is made if it is not there."""
    return BertTokenizer(books_vocabulary(PREPARED))


def config(**changes: object) -> BertConfig:
    """The recipe's model."""
    return BertConfig.from_dict(json.loads(MODEL.read_text(encoding="utf-8")) | changes)


@contextmanager
def stores(words: BertTokenizer) -> Iterator[tuple[TokenStore, TokenStore]]:
    """The text that is learned from, and the one that is judged by."""
    with tempfile.TemporaryDirectory() as folder:
        yield (
            tokenize_files([TRAIN], Path(folder) / "train", words),
            tokenize_files([VALID], Path(folder) / "valid", words),
        )
