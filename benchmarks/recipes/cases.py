"""The recipes: flags of `examples/`, and our run of them."""

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.kit.record import ROOT
from bert_fast.cli import main


@dataclass(frozen=True)
class Recipe:
    """One of `examples/`.

    name: of the file. task: as the command names it. metrics: those to compare, the main one first.
    has_peer: whether transformers' Trainer runs it, too.
    has_masked: whether transformers also runs it with padding kept out of the softmax over a window's positions.
    """

    name: str
    task: str
    metrics: tuple[str, ...]
    has_peer: bool = True
    has_masked: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        """Who runs it: "ours", "theirs", "masked"."""
        return ("ours", *(("theirs",) if self.has_peer else ()), *(("masked",) if self.has_masked else ()))

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
        Recipe("books", "pretrain", ("masked_lm", "context_free_loss", "next_sentence_accuracy"), has_peer=False),
        Recipe("sms", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("polarity", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("wnut17", "ner", ("f1", "precision", "recall")),
        Recipe("uner_zh", "ner", ("f1", "precision", "recall")),
        Recipe("xquad", "qa", ("f1", "exact_match"), has_masked=True),
        Recipe("swag", "choice", ("accuracy",)),
    )
}


class Clock:
    """Seconds of wall and of all threads' CPU that a block took."""

    seconds: float
    cpu_seconds: float

    @contextmanager
    def running(self) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began


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
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        ours = {"output_dir": directory, "include_num_input_tokens_seen": True, "disable_tqdm": True, "use_cpu": True}
        with clock.running(), contextlib.redirect_stdout(io.StringIO()):
            status = main.main([*recipe.words, *as_words(flags | ours)])
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
        "seconds": round(clock.seconds, 1),
        "cpu_seconds": round(clock.cpu_seconds, 1),
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
