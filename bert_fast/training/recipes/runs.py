"""`run`: a run from its settings, in one phase or two, to its predictions; and `plan_text`, what it would do."""

import dataclasses
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_fast.checks import check_choice, check_flag
from bert_fast.data.batches import Batches, Source
from bert_fast.training.checkpoints import RunLock
from bert_fast.training.config import TrainingConfig
from bert_fast.training.distributed import Processes
from bert_fast.training.loop import RESUME, Run, TrainingResult
from bert_fast.training.recipes.build import Parts, build, settings_at_fault
from bert_fast.training.recipes.settings import Settings, SettingsError
from bert_fast.training.reporting import default_observers
from bert_fast.training.reporting.formatting import numbered
from bert_fast.training.trainer import Trainer

__all__ = ["phases", "plan_text", "run"]

_DIRECTORIES = ("checkpoints", "model", "predictions", "tokens")  # in output_dir
_SHOWN_EXAMPLES = 4
_SHOWN_CHARS = 1000  # of an example


def phases(settings: Settings) -> list[Settings]:
    """The parts of a run, one after the other: two where `long_length` of pre-training asks for it.

    Each is a run of its own in a directory below output_dir; the second begins with the first one's model.
    """
    found, model = [], settings.model
    for data, training in settings.data.phases(settings.training):
        found.append(dataclasses.replace(settings, model=model, data=data, training=training))
        tokenizer = settings.model.tokenizer or settings.model.model
        model = dataclasses.replace(settings.model, model=str(training.output_dir / "model"), tokenizer=tokenizer)
    return found


def run(settings: Settings, *, resume: str = "auto", quiet: bool = False) -> TrainingResult:
    """Trains as the settings say, and writes what the model says about the examples to judge by into predictions/.

    Processes that `torchrun` or `accelerate launch` started share the work; all of them call this.

    Args:
        settings: of the run.
        resume: "auto" goes on where an earlier run of the same settings was, "must" raises if there was none, "never"
            if there was one.
        quiet: nothing is shown on the terminal, not even warnings of what `Task.notes` says.

    Returns: how it ended; of two phases, the last one begun.

    Raises:
        SettingsError, OSError, CheckpointError, SourceError, StoreError: see `build`.
        TrainingError: see `Trainer.train`.
    """
    _check_settings(settings)
    check_flag("quiet", quiet)
    check_choice("resume", resume, RESUME)
    return list(_results(settings, resume, quiet))[-1]


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, Settings):
        raise TypeError(f"settings: expected Settings, got {type(settings).__name__}")


def _checked_phases(settings: Settings) -> list[Settings]:
    """The phases; before examples are read, sees that directories can be made and written where they write."""
    planned = phases(settings)
    for output_dir in dict.fromkeys(each.training.output_dir for each in (settings, *planned)):
        _check_output_dir(output_dir)
    return planned


def _check_output_dir(path: Path) -> None:
    for place in (path, *(path / name for name in _DIRECTORIES)):
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        problem = None
        if not place.is_dir():
            problem = f"{place} is no directory"
        elif not os.access(place, os.W_OK | os.X_OK):
            problem = f"{place} may not be written"
        if problem is not None:
            raise SettingsError(f"output_dir: {path} cannot be made or written: {problem}")


def _results(settings: Settings, resume: str, quiet: bool) -> Iterator[TrainingResult]:
    planned = _checked_phases(settings)
    tokens_dir = settings.training.output_dir / "tokens"
    longest = settings.data.longest
    lock = RunLock(settings.training.output_dir)
    try:
        for phase in planned:
            with settings_at_fault():  # a precision, say, that the device does not have
                on_main = Processes(phase.training).on_main
            if phase is planned[0] and len(planned) > 1:  # each takes one of its own, too
                on_main(lock.acquire)
            parts = build(phase, longest=longest, tokens_dir=tokens_dir, on_main=on_main)
            trainer = _trainer(parts, quiet)
            if trainer.is_main and not quiet:
                for note in _notes(parts):
                    warnings.warn(note, stacklevel=2)
            result = trainer.train(resume)
            if resume == "must":  # there is something to go on with, maybe not of every phase
                resume = "auto"
            yield result
            if result.outcome.startswith("interrupted"):
                return
            _write_predictions(trainer, parts, phase.training.output_dir / "predictions")
    finally:
        lock.release()


def _notes(parts: Parts) -> list[str]:
    """What the task says before the first step."""
    return parts.task.notes(_batches(parts))


def _batches(parts: Parts) -> Batches:
    train, config = parts.task.train, parts.settings.training
    assert train is not None
    return Batches(train, batch_size=config.batch_size, max_tokens=config.batch_tokens, seed=config.seed)


def _write_predictions(trainer: Trainer, parts: Parts, directory: Path) -> None:
    """What the model says about the examples to judge by, where there are any."""
    valid = parts.task.valid
    if valid is None:
        return
    predictions = trainer.predict(valid)
    if trainer.is_main:
        directory.mkdir(exist_ok=True)
        parts.task.write_predictions(directory / "valid", valid, predictions)


def _trainer(parts: Parts, quiet: bool) -> Trainer:
    config = parts.settings.training
    assert parts.task.train is not None
    longest = int(parts.task.train.lengths(0).max(initial=0))
    if config.batch_tokens is not None and longest > config.batch_tokens:
        raise SettingsError(
            f"batch_tokens: expected room for the longest example, {longest} tokens, got {config.batch_tokens}"
        )
    return Trainer(
        parts.model,
        parts.task,
        config,
        tokenizer=parts.tokenizer,
        observers=default_observers(config.output_dir, quiet=quiet),
        settings=parts.settings.as_dict(),
    )


def plan_text(settings: Settings) -> str:
    """What `run` would do, and the first batch as text; nothing is trained or written.

    Raises: as `run`.
    """
    _check_settings(settings)
    first, *others = _checked_phases(settings)
    parts = build(first, longest=settings.data.longest)
    lines = _plan_lines(parts)
    for other in others:
        lines.append(
            f"then         {_duration(other.training)} with max_length {other.data.max_length}, "
            f"into {other.training.output_dir}"
        )
    return "\n".join([*lines, "", *_first_batch(parts)])


def _plan_lines(parts: Parts) -> list[str]:
    settings, task, model = parts.settings, parts.task, parts.model
    config, trainer = settings.training, _trainer(parts, quiet=True)
    plan = Run(trainer.setup)
    assert task.train is not None
    lengths = task.train.lengths(0)
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers = f"{model.config.num_hidden_layers} layers of {model.config.hidden_size}"
    per_step = config.gradient_accumulation * trainer.processes.count
    batches = plan.batches.plan(0)
    fill = f"; {batches.fill:.1%} of their room is used" if config.batch_tokens is not None else ""
    return [
        f"task         {settings.task}: {type(model).__name__} of {layers}, {weights:,} parameters",
        f"examples     {len(lengths):,} to train on, {_count(task.valid)} to judge by (by {task.metric})",
        f"tokens       {lengths.sum():,} an epoch, {lengths.mean():.1f} an example, {lengths.max()} at most",
        f"steps        {plan.num_steps:,}; {plan.epoch_steps:,} are an epoch, {per_step} batches a step",
        f"batches      {len(batches):,} an epoch, {_limits(config)}{fill}",
        *([f"classes      {numbered(task.class_names())}"] if task.class_names() else []),
        f"device       {trainer.processes.device}, {config.precision}",
        f"memory       {weights * 16 / 2**20:,.0f} MiB: weights, gradients and two averages of {config.optimizer}; "
        "activations come on top",
        f"writes       {config.output_dir}: checkpoints (the newest {config.keep_checkpoints}, and the best), "
        "metrics.jsonl, report.html, model, predictions",
        *(f"note         {note}" for note in _notes(parts)),
    ]


def _first_batch(parts: Parts) -> list[str]:
    train, indices = parts.task.train, _batches(parts).plan(0).indices(0)
    assert train is not None
    shown = [parts.task.describe(train, int(index)) for index in indices[:_SHOWN_EXAMPLES]]
    return [f"first batch  {len(indices)} examples; of them", *(textwrap.indent(_cut(text), "  ") for text in shown)]


def _count(source: Source | None) -> str:
    return f"{len(source.lengths(0)):,}" if source is not None else "none"


def _limits(config: TrainingConfig) -> str:
    limits = []
    if config.batch_size is not None:
        limits.append(f"{config.batch_size} examples")
    if config.batch_tokens is not None:
        limits.append(f"{config.batch_tokens:,} tokens")
    return " and ".join(limits) + " at most"


def _duration(config: TrainingConfig) -> str:
    return f"{config.epochs:g} epochs" if config.steps is None else f"{config.steps:,} steps"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ..."
