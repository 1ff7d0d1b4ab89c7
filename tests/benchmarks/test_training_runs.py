"""Whole runs: what they report, and that both sides do the same work."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.kit import bert
from benchmarks.models.training_runs import SMALL_CASES, DrawnSource, masked_words, time_run

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_small_run_reports_itself() -> None:
    (result,) = time_run(SMALL_CASES[0])
    assert result["steps"] == SMALL_CASES[0].steps - 1
    assert result["tokens_per_s"] > 0
    assert 0 <= result["wait_share"] <= 1
    assert 0.8 < result["fill"] <= 1
    assert 3 < result["last_loss"] < 7  # ln 100 = 4.6


def test_both_sides_of_a_run_on_a_cpu_do_the_same_work(shared_data: Path) -> None:
    pytest.importorskip("transformers")
    result = masked_words("single_books", 2, bert.TINY)
    assert len(result["bert_fast_s"]) == len(result["transformers_s"]) == 2
    assert min(result["bert_fast_s"] + result["transformers_s"]) > 0
    seconds, speed = sum(result["bert_fast_s"]), result["bert_fast_tokens_per_s"]
    # Two rounds of seconds to three places, and their rate to one.
    assert abs(seconds * speed - result["real_tokens"]) <= 0.001 * speed + 0.05 * seconds + 1e-3
    # Both sides see the same sequences, three batches of 32 a round; theirs are filled up to the longest of a batch.
    assert 2 * 96 * 2 < result["real_tokens"] < 2 * 96 * 512
    assert 0.2 < result["fill"] < 1


def test_drawn_batches_are_masked_as_in_pretraining() -> None:
    source = DrawnSource([20] * 200, vocab_size=100)
    batch = source.batch(0, np.arange(200))
    words = np.concatenate([source.tokens(i) for i in range(200)])
    changed = np.flatnonzero(batch["input_ids"].numpy() != words)
    positions = batch["masked_lm_positions"].numpy()
    assert set(changed) <= set(positions)
    assert np.array_equal(batch["labels"].numpy(), words[positions])
    assert 0.14 < len(positions) / (18 * 200) < 0.16


def test_operations_are_those_that_pytorch_counts() -> None:
    transformers = pytest.importorskip("transformers", reason="the model whose products are counted")
    from torch.utils.flop_counter import FlopCounterMode

    length, vocab_size = 7, 97
    config = bert.TINY.config(transformers.BertConfig, vocab_size=vocab_size, attn_implementation="eager")
    model = transformers.BertForMaskedLM(config)
    ids = torch.arange(1, length + 1)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert bert.TINY.training_flops([length], length, vocab_size) == counter.get_total_flops()
