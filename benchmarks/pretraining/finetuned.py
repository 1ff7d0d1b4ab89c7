"""The pre-trained model on a classification of texts, beside the same model from random weights."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.record import ROOT
from bert_fast import BertForPreTraining, BertTokenizer
from bert_fast.training.recipes import Settings, run

SEEDS = (0, 1, 2)
# Of recipes of examples/: what a small model needs that MiniLM does not.
CHANGES: dict[str, dict[str, Any]] = {
    "polarity": {"steps": None, "epochs": 2, "learning_rate": 5e-4, "warmup": 0.1},
    "sms": {"epochs": 2, "learning_rate": 5e-4, "warmup": 0.1},
}


def finetuned(directory: Path, task: str) -> Iterator[dict[str, Any]]:
    """The lines to store: task, start ("pre-trained" or "random"), seed, steps, metrics of the last weights.

    directory: of a pre-trained model with its tokenizer. task: a key of `CHANGES`. A start from random weights differs
    between seeds; so do, for both, the new head and the order of the examples.
    """
    torch.set_num_threads(1)
    config = BertForPreTraining.from_pretrained(directory).config
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            random = Path(folder) / f"random-{seed}"
            torch.manual_seed(seed)
            BertForPreTraining(config).save_pretrained(random)
            BertTokenizer.from_pretrained(directory).save_pretrained(random)
            for start, model in (("pre-trained", directory), ("random", random)):
                changes = CHANGES[task] | {
                    "model": str(model), "output_dir": str(Path(folder) / f"{start}-{seed}"), "seed": seed,
                    "max_length": config.max_position_embeddings, "keep_checkpoints": 0,
                }  # fmt: skip
                settings = Settings.load("classify", ROOT / "examples" / f"{task}.yaml", changes)
                result = run(settings, quiet=True)
                yield {"task": task, "start": start, "seed": seed, "steps": result.step, "metrics": result.metrics}
