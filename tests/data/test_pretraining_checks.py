"""The loss of a guess without context, against a count."""

import math
from pathlib import Path

import numpy as np
import pytest

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.pretraining import PretrainingSource, token_counts, unigram_entropy
from bert_fast.data.pretraining_checks import context_free_loss

LETTERS = "abcdefghijklmnop"
TOKENIZER = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS])


def make_store(folder: Path, lines: list[str]) -> TokenStore:
    folder.mkdir(exist_ok=True)
    path = folder / "corpus.txt"
    path.write_text("\n".join(lines))
    return tokenize_files([path], folder / "store", TOKENIZER)


def random_lines(count: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(LETTERS) + 1)
    words = draw.choice(list(LETTERS), (count, 12), p=shares / shares.sum())
    return [" ".join(row) for row in words]


def test_the_context_free_loss_is_the_least_without_context(tmp_path: Path) -> None:
    store = make_store(tmp_path, random_lines(3000))
    source = PretrainingSource(store, TOKENIZER, max_length=32, next_sentence=False)
    counts = token_counts(store, TOKENIZER)
    level = context_free_loss(source, counts)
    # Words are drawn one by one, so that there is no context; what can be known is p(there | shown), here counted.
    batch = source.batch(0, np.arange(len(source.lengths(0))))
    there, shown = batch["labels"].numpy(), batch["input_ids"].numpy()[batch["masked_lm_positions"].numpy()]
    table = np.full((len(TOKENIZER), len(TOKENIZER)), 1e-9)
    np.add.at(table, (shown, there), 1.0)
    counted = -np.log((table / table.sum(1, keepdims=True))[shown, there]).mean()
    assert counted < level < counted + 0.03, "the table knows these very draws"
    entropy = unigram_entropy(store, TOKENIZER)
    assert 0.1 < entropy - level < 0.25 * entropy


def test_counts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    source = PretrainingSource(make_store(tmp_path, random_lines(9)), TOKENIZER, next_sentence=False)
    with pytest.raises(ValueError, match=f"counts: expected one for each of {len(TOKENIZER)} tokens, got 3"):
        context_free_loss(source, np.ones(3, dtype=np.int64))
    assert math.isfinite(context_free_loss(source, np.zeros(len(TOKENIZER), dtype=np.int64)))
