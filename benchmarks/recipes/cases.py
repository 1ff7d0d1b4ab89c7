"""The recipes: flags of `examples/`, and our run of them."""

import contextlib
import io
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.kit.results import ROOT
from bert_fast.cli import main


@dataclass(frozen=True)
class Recipe:
    """One of `examples/`.

    name: of the file. task: as the command names it. metrics: those to compare, the main one first. sides: who runs it;
    "theirs" is transformers' Trainer.
    """

    name: str
    task: str
    metrics: tuple[str, ...]
    sides: tuple[str, ...] = ("ours", "theirs")

    @property
    def words(self) -> list[str]:
        """The command, without its flags."""
        return ["pretrain"] if self.task == "pretrain" else ["finetune", self.task]

    @property
    def command(self) -> str:
        """What a reader types."""
        return f"bert-fast {' '.join(self.words)} --config examples/{self.name}.yaml"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("books", "pretrain", ("masked_lm", "context_free_loss", "next_sentence_accuracy"), ("ours",)),
        Recipe("sms", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("polarity", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("wnut17", "ner", ("f1", "precision", "recall")),
        Recipe("uner_zh", "ner", ("f1", "precision", "recall")),
        Recipe("xquad", "qa", ("f1", "exact_match")),
        Recipe("swag", "choice", ("accuracy",)),
    )
}


def flags_of(recipe: Recipe, seed: int, **changes: Any) -> dict[str, Any]:
    """The flags of the file by name, with another seed; `changes` replace others, as the command line does."""
    values = yaml.safe_load((ROOT / "examples" / f"{recipe.name}.yaml").read_text(encoding="utf-8"))
    return dict(values) | {"seed": seed} | changes


def as_words(flags: dict[str, Any]) -> list[str]:
    """Flags as the command line takes them."""
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def our_run(recipe: Recipe, flags: dict[str, Any]) -> dict[str, Any]:
    """What the command does, in a directory that is forgotten: figures of the last evaluation, time and tokens.

    Raises:
        RuntimeError: the command failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as directory:
        ours = {"output_dir": directory, "include_num_input_tokens_seen": True, "disable_tqdm": True, "use_cpu": True}
        begun = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            status = main.main([*recipe.words, *as_words(flags | ours)])
        taken = cost(*begun)
        if status:
            raise RuntimeError(f"{recipe.name}: the command ended with status {status}")
        found, state = (
            json.loads((Path(directory) / name).read_text(encoding="utf-8"))
            for name in ("eval_results.json", "trainer_state.json")
        )
    return {
        "metrics": figures(found),
        "steps": state["global_step"],
        "tokens": state["num_input_tokens_seen"],
        **taken,
    }


def cost(begun: float, cpu_begun: float) -> dict[str, float]:
    """Seconds of wall and of all threads' CPU since a run began, and how many threads there are."""
    return {
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu_seconds": round(time.process_time() - cpu_begun, 1),
        "threads": torch.get_num_threads(),
    }


def figures(evaluation: dict[str, float]) -> dict[str, float]:
    """Loss and metrics of an evaluation by their bare names; what it took is left out."""
    of_time = ("_runtime", "_per_second", "_time")
    return {
        name.removeprefix("eval_"): value
        for name, value in evaluation.items()
        if name.startswith("eval_") and not name.endswith(of_time)
    }
