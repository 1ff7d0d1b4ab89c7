"""What is said of a text before its first step: by hand, and against a model that does just that."""

import math
from pathlib import Path

import numpy as np
import pytest

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource, token_counts, unigram_entropy
from bert_fast.data.pretraining_checks import context_free_loss, repeated_share, unknown_share
from bert_fast.training.tasks.pretraining import PretrainingTask

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


def test_unknown_words(tmp_path: Path) -> None:
    assert unknown_share(make_store(tmp_path / "known", ["a b c d"]), TOKENIZER) == 0
    store = make_store(tmp_path / "unknown", ["a b c \u4e2d", "a \u6587 c d"])
    assert unknown_share(store, TOKENIZER) == 0.25


def test_repeated_sentences(tmp_path: Path) -> None:
    lines = random_lines(40)
    assert repeated_share(make_store(tmp_path / "new", lines)) == 0
    assert repeated_share(make_store(tmp_path / "twice", [*lines, *lines[::-1]])) == 0.5
    assert repeated_share(make_store(tmp_path / "short", ["a b c", "a b c"])) == 0, "short ones repeat by chance"
    turned = [" ".join(line.split()[::-1]) for line in lines]
    assert repeated_share(make_store(tmp_path / "turned", [*lines, *turned])) == 0


def test_both_are_said_before_the_first_step(tmp_path: Path) -> None:
    def notes(folder: str, lines: list[str]) -> list[str]:
        source = PretrainingSource(make_store(tmp_path / folder, lines), TOKENIZER, max_length=32, next_sentence=False)
        return PretrainingTask(source, source).notes(Batches(source, max_tokens=64))

    assert notes("well", random_lines(50)) == []
    foreign, foreign_valid = notes("foreign", [f"{line} \u4e2d" for line in random_lines(50)])
    assert foreign.startswith("tokenizer: 7.7% of the tokens of train are [UNK]") and "of valid" in foreign_valid
    (repeated,) = notes("again", random_lines(50) * 3)
    assert repeated.startswith("train: 67% of the tokens stand in sentences that stood there before")


def test_what_a_stall_means(tmp_path: Path) -> None:
    task = PretrainingTask(None, None)

    def said(loss: float) -> str | None:
        return task.meaning_of_stall({"masked_lm": loss, "context_free_loss": 5.79, "unigram_entropy": 6.43})

    assert said(5.2) is None
    assert "comes to this plateau first" in (said(5.75) or "")
    assert "a learning rate that is too high" in (said(6.4) or "")
