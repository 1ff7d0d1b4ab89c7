"""Token stores of made-up texts, for tests of pre-training data."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(60)]
PIECES = [f"##p{number}" for number in range(20)]


def make_tokenizer() -> BertTokenizer:
    """Words w0 to w59, each followed by any number of pieces p0 to p19: "w3p1p12" are three tokens."""
    return BertTokenizer([*SPECIAL, *WORDS, *PIECES])


def make_store(folder: Path, documents: list[list[int]], *, with_sentences: bool = True) -> TokenStore:
    """A store of documents that have sentences of these numbers of tokens; tokens are drawn from a fixed seed."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        ["".join(_words(draw, size)).strip() for size in document] for document in documents
    ]  # a document is a list of lines
    path = folder / "corpus.txt"
    if with_sentences:
        path.write_text("\n\n".join("\n".join(lines) for lines in texts) + "\n")
        store = tokenize_files([path], folder / "store", make_tokenizer())
    else:
        path.write_text("\n".join(" ".join(lines) for lines in texts) + "\n")
        store = tokenize_files([path], folder / "store", make_tokenizer(), format="lines")
    assert np.diff(store.boundaries).tolist() == [sum(document) for document in documents]
    return store


def _words(draw: np.random.Generator, size: int) -> list[str]:
    """Strings that make so many tokens: a space and a word, or a piece that goes on with it."""
    is_piece = draw.random(size) < 0.3
    is_piece[:1] = False
    numbers = draw.integers(0, 20, size)
    return [f"p{n}" if piece else f" w{n}" for n, piece in zip(numbers.tolist(), is_piece.tolist(), strict=True)]


def rows_of(sequences: Any, name: str = "ids") -> list[list[int]]:
    """The ids of every one of `Sequences`, or what else they have for each token."""
    array = getattr(sequences, name).tolist()
    return [array[start:stop] for start, stop in itertools.pairwise(sequences.boundaries.tolist())]


def sentence_ends(documents: list[list[int]]) -> list[list[int]]:
    """Boundaries of the sentences of each document, in the store."""
    ends, start = [], 0
    for document in documents:
        ends.append(list(itertools.accumulate(document, initial=start)))
        start = ends[-1][-1]
    return ends


def random_documents(seed: int, count: int, sentences: int = 30, tokens: int = 40) -> list[list[int]]:
    """Documents of 1 to `sentences` sentences of 1 to `tokens` tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, tokens + 1, draw.integers(1, sentences + 1)).tolist() for _ in range(count)]
