"""The memory of a process that trains on a CPU, over thousands of batches of varied lengths."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_fast import BertConfig, BertForMaskedLM
from bert_fast.data.batches import Source
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Trainer, TrainingConfig
from bert_fast.training.observers import Observer, Step
from bert_fast.training.task import Predictions, Task

_PAGE = mmap.PAGESIZE
_SIZES = dict(
    vocab_size=4000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
    max_position_embeddings=128,
)  # fmt: skip
_BATCH_SIZE, _EXAMPLES = 32, 6400
_MEAN_LENGTHS = (20, 60)  # one batch is of short texts, the other of long ones: sizes of all kinds


class _Texts:
    """Random tokens; examples of 5 to 128 tokens, lengths as skewed as those of real texts."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        means = generator.choice(_MEAN_LENGTHS, _EXAMPLES)
        self._lengths = np.clip(generator.gamma(2.0, means / 2), 5, 128).astype(np.int32)

    def lengths(self, epoch: int) -> np.ndarray:
        return self._lengths

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        lengths = self._lengths[indices]
        generator = np.random.default_rng(indices[0])
        ids = torch.from_numpy(generator.integers(5, _SIZES["vocab_size"], int(lengths.sum())))
        places = np.flatnonzero(generator.random(len(ids)) < 0.15)
        return PackedBatch(
            input_ids=ids,
            cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
            max_seqlen=int(lengths.max()),
            masked_lm_positions=torch.from_numpy(places),
            labels=ids[places],
        )


class Words(Task):
    """Masked words of a source that nobody judges by."""

    name = "words"

    def __init__(self, source: Source) -> None:
        self.train, self.valid = source, None

    def predict(self, model: Any, batch: Any) -> Any:
        raise NotImplementedError

    def score(self, source: Any, predictions: Predictions) -> dict[str, float]:
        raise NotImplementedError

    def write_predictions(self, path: Path, source: Any, predictions: Predictions) -> list[Path]:
        raise NotImplementedError


class _Resident(Observer):
    """Megabytes of the process's memory, after every report."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def step(self, step: Step) -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            self.found.append((step.step, int(file.read().split()[1]) * _PAGE / 1e6))


def resident(batches: int, kernels: int | None = None) -> Iterator[tuple[int, float]]:
    """(batches done, megabytes of the process) every fiftieth of the way; to be called once in a process.

    kernels: that oneDNN keeps; None: as a Trainer has it.
    """
    if kernels is not None:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(kernels)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    watched = _Resident()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            Path(folder), steps=batches, batch_size=_BATCH_SIZE, learning_rate=1e-4, keep_checkpoints=0,
            log_every=max(1, batches // 50),
        )  # fmt: skip
        Trainer(BertForMaskedLM(BertConfig(**_SIZES)), Words(_Texts()), config, observers=[watched]).train()
    yield from watched.found


def growth(found: list[tuple[int, float]]) -> dict[str, float]:
    """Mean megabytes of the second quarter of the way and of the last, the growth between them, and the most."""
    sizes = np.array([size for _, size in found])
    quarter = max(1, len(sizes) // 4)
    early, late = float(sizes[quarter : 2 * quarter].mean()), float(sizes[-quarter:].mean())
    return {
        "early_mb": round(early, 1),
        "late_mb": round(late, 1),
        "growth": round(late / early - 1, 4),
        "most_mb": round(float(sizes.max()), 1),
    }
