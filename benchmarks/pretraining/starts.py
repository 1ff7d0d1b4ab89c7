"""Models to fine-tune from: random or pre-trained weights, as they are or after masked words of a task's own texts.

The latter is task-adaptive pre-training: Gururangan et al. 2020 (arXiv:2004.10964), section 4.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from bert_fast import BertForPreTraining, BertTokenizer
from bert_fast.training.recipes import Settings, run


class Start(NamedTuple):
    """Whether the weights are those of a pre-training run, and whether masked words of the task's texts follow."""

    is_pretrained: bool
    is_adapted: bool


STARTS = {
    "random": Start(is_pretrained=False, is_adapted=False),
    "pre-trained": Start(is_pretrained=True, is_adapted=False),
    "pre-trained, task's texts": Start(is_pretrained=True, is_adapted=True),
    "random, task's texts": Start(is_pretrained=False, is_adapted=True),
}
ADAPTATION_STEPS = 1000
_MASKED_WORDS = {"next_sentence": False, "max_length": 64, "batch_tokens": 2048, "learning_rate": 1e-3, "warmup": 0.1}


class Starts:
    """Makes models when they are asked for first, and keeps them.

    Args:
        directory: of a pre-trained model with its tokenizer.
        folder: where models are kept.
        steps: of an adaptation, 2,048 tokens each.

    Attributes:
        positions: tokens of a sequence that they take.
    """

    def __init__(self, directory: Path, folder: Path, steps: int = ADAPTATION_STEPS) -> None:
        self.directory, self.folder, self.steps = directory, folder, steps
        self._config = BertForPreTraining.from_pretrained(directory).config
        self.positions = self._config.max_position_embeddings

    def model(self, name: str, seed: int, texts: Path) -> Path:
        """The directory of a model with its tokenizer.

        Args:
            name: a key of `STARTS`.
            seed: of random weights, and of the masks of an adaptation.
            texts: what an adaptation learns from, one text a line; known by the file's name.
        """
        start = STARTS[name]
        begin = self.directory if start.is_pretrained else self._random(seed)
        return self._adapted(begin, seed, texts) if start.is_adapted else begin

    def _random(self, seed: int) -> Path:
        path = self.folder / f"random-{seed}"
        if not path.exists():
            torch.manual_seed(seed)
            BertForPreTraining(self._config).save_pretrained(path)
            BertTokenizer.from_pretrained(self.directory).save_pretrained(path)
        return path

    def _adapted(self, begin: Path, seed: int, texts: Path) -> Path:
        path = self.folder / f"{begin.name}-{texts.stem}-{seed}"
        if not path.exists():
            values = _MASKED_WORDS | {"model": str(begin), "train": [str(texts)], "format": "lines", "seed": seed}
            values |= {"steps": self.steps, "output_dir": str(path), "keep_checkpoints": 1}
            run(Settings.of("pretrain", values), quiet=True)
        return path / "model"


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """One text a line, each once."""
    path.write_text("".join(f"{text}\n" for text in dict.fromkeys(texts)), encoding="utf-8")
    return path
