"""The pre-trained model on a classification of texts, beside the same model from random weights."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.record import DATA, ROOT
from bert_fast import BertForPreTraining, BertTokenizer
from bert_fast.training.recipes import Settings, run

SEEDS = (0, 1, 2)
_EVERY = 10  # of so many examples one is learned from
_PAIRS = DATA / "classification" / "question_sentence_pairs"
# Changes of examples/polarity.yaml for a small model; "few": a tenth of the examples; "pairs": does a sentence answer a
# question?
CASES: dict[str, dict[str, Any]] = {
    "few": {"steps": None, "epochs": 5, "learning_rate": 1e-3, "warmup": 0.1},
    "all": {"steps": None, "epochs": 2, "learning_rate": 5e-4, "warmup": 0.1},
    "pairs": {
        "train": str(_PAIRS / "train.tsv"),
        "valid": str(_PAIRS / "dev.tsv"),
        "text": "question",
        "text_pair": "sentence",
        "steps": None,
        "epochs": 5,
        "learning_rate": 5e-4,
        "warmup": 0.1,
    },
}


def finetuned(directory: Path, case: str) -> Iterator[dict[str, Any]]:
    """The lines to store: case, start ("pre-trained" or "random"), seed, steps, metrics after the last step.

    directory: of a pre-trained model with its tokenizer. case: a key of `CASES`. A start from random weights differs
    between seeds; so do, for both, the new head and the order of the examples.
    """
    torch.set_num_threads(1)
    config = BertForPreTraining.from_pretrained(directory).config
    with tempfile.TemporaryDirectory() as folder:
        common = CASES[case] | {"max_length": config.max_position_embeddings, "keep_checkpoints": 0}
        if case == "few":
            common["train"] = str(_few(Path(folder)))
        for seed in SEEDS:
            random = Path(folder) / f"random-{seed}"
            torch.manual_seed(seed)
            BertForPreTraining(config).save_pretrained(random)
            BertTokenizer.from_pretrained(directory).save_pretrained(random)
            for start, model in (("pre-trained", directory), ("random", random)):
                output = str(Path(folder) / f"{start}-{seed}-run")
                changes = common | {"model": str(model), "output_dir": output, "seed": seed}
                settings = Settings.load("classify", ROOT / "examples" / "polarity.yaml", changes)
                result = run(settings, quiet=True)
                yield {"case": case, "start": start, "seed": seed, "steps": result.step, "metrics": result.metrics}


def _few(folder: Path) -> Path:
    """The header and every tenth example of the file to learn from."""
    lines = (DATA / "classification" / "sentence_polarity" / "train.tsv").read_text(encoding="utf-8").splitlines(True)
    path = folder / "few.tsv"
    path.write_text("".join(lines[:1] + lines[1::_EVERY]), encoding="utf-8")
    return path
