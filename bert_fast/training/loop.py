"""`Run`: the loop of a `Trainer`. Steps, what is due after them, and going on where a run was."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.checks import check_choice
from bert_fast.data.batches import Batches
from bert_fast.errors import CheckpointError
from bert_fast.files import write_atomically
from bert_fast.training.checkpoints import WEIGHTS, CheckpointFolder, Progress, RunLock
from bert_fast.training.config import TrainingConfig
from bert_fast.training.distributed import Processes
from bert_fast.training.failures import FiniteWatch, StopSignals, explained, smaller_steps
from bert_fast.training.gradients import Gradients, ReplayedGradients, run_budgets, total
from bert_fast.training.health import Health
from bert_fast.training.judging import Judge
from bert_fast.training.loader import BatchLoader, MicroBatch
from bert_fast.training.observers import Evaluation, Observer, Plan, Tally, tell
from bert_fast.training.optimization import learning_rate_schedule
from bert_fast.training.reporting import model_flops
from bert_fast.training.reporting.run_directory import device_name
from bert_fast.training.task import Task
from bert_fast.training.training_state import (
    agreement,
    check_agreement,
    check_processes,
    load_weights,
    restore_run,
    run_state,
    seed_generators,
    whole_model,
)
from bert_fast.warming import warm_up

__all__ = ["RESUME", "TASK_FILE", "Run", "Setup", "TrainingResult"]

TASK_FILE = "bert_fast_task.json"  # beside the weights: how model and task were made

RESUME = ("auto", "must", "never")
_LESS = "Lower batch_tokens or batch_size, or for evaluation eval_batch_tokens"
_WORTH_TELLING = 5.0  # seconds
_BATCHES_LOOKED_AT = 1000  # for the largest one
_RANK_SEEDS = 1_000_003  # processes draw dropout from seeds this far apart


@dataclass(frozen=True)
class Setup:
    """A task, how to train on it, and everything that takes part, on its device.

    model: what is saved and judged. prepared: what is called in training, with autocast and gradient exchange.
    observers: in the main process only. evaluate: loss and metrics over the task's examples to judge by.
    tokenizer, settings: kept beside the weights, as `Trainer` explains them.
    """

    task: Task
    config: TrainingConfig
    model: Any
    prepared: nn.Module
    optimizer: Any
    processes: Processes
    observers: list[Observer]
    evaluate: Callable[[], dict[str, float]]
    tokenizer: Any
    settings: dict[str, Any]


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    outcome: "finished", "stopped early" or "interrupted: SIGTERM". step: steps done.
    best_metric, best_step: of the evaluation by which the weights in model_dir were chosen; None where there was none:
    then they are the last ones.
    metrics: of the weights in model_dir; of an interrupted run, which writes none there, those of the last evaluation.
    """

    outcome: str
    step: int
    metrics: dict[str, float]
    best_metric: float | None
    best_step: int | None
    model_dir: Path


class Run:
    """One call of `Trainer.train`."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.task, self.config = setup, setup.task, setup.config
        self.model, self.optimizer, self.processes = setup.model, setup.optimizer, setup.processes
        config, source = self.config, self.task.train
        if source is None or not len(source.lengths(0)):
            raise ValueError("task: expected examples to train on, got none")
        if self.task.valid is not None and not len(self.task.valid.lengths(0)):
            raise ValueError("task: expected examples to judge by, got none (valid=None: no evaluation)")
        self.source = source
        self.batches = Batches(
            source, batch_size=config.batch_size, max_tokens=config.batch_tokens, seed=config.seed
        )  # fmt: skip
        self.share = config.gradient_accumulation * self.processes.count
        self.epoch_steps = -(-len(self.batches.plan(0)) // self.share)
        self.num_steps = config.steps or max(1, round(float(config.epochs or 0) * self.epoch_steps))
        self.learning_rate = learning_rate_schedule(
            config.schedule, config.learning_rate, self.num_steps, config.warmup, config.schedule_power
        )
        self.checkpoints = CheckpointFolder(config.output_dir / "checkpoints", config.keep_checkpoints)
        self._saves = config.keep_checkpoints > 0  # checkpoints that are neither the best nor a signal's
        self.lock = RunLock(config.output_dir)
        self.observers = setup.observers
        self.tally = Tally(self.processes, config.batch_tokens)
        self.watch = FiniteWatch(config.output_dir / "failed_batch", self.processes, self._examples)
        self.judge = Judge(self.task, config, setup.evaluate, setup.observers)
        self.health = Health(config, self.task)
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.grad_norm: Tensor | None = None
        self.gradients: Gradients
        self.epochs = 0.0  # done, the last in part
        self.paused = 0.0  # seconds of evaluations and checkpoints since the last report

    def train(self, resume: str) -> TrainingResult:
        """See `Trainer.train`."""
        try:
            outcome = self._begin(resume) or self._steps()
            result = self._finish(outcome)
        except BaseException as error:
            with contextlib.suppress(Exception):  # an observer that fails, too, would hide the error
                tell(self.observers, Observer.end, f"failed: {str(error) or type(error).__name__}")
            raise
        else:
            tell(self.observers, Observer.end, result.outcome)
            return result
        finally:
            self.lock.release()

    # Beginning and end

    def _begin(self, resume: str) -> str | None:
        """Finds out where to begin; returns the outcome if nothing is left to do."""
        check_choice("resume", resume, RESUME)
        self.agreed = agreement(self.config, self.task, self.model, self.setup.tokenizer, self.processes)
        check_processes(self.agreed, self.processes)
        self.processes.on_main(self.lock.acquire)
        has_checkpoints = self.processes.from_main(bool(self.checkpoints.steps()))
        if resume == "must" and not has_checkpoints:
            raise CheckpointError(f"{self.checkpoints.path}: expected a checkpoint to go on from, found none")
        if resume == "never" and has_checkpoints:
            raise CheckpointError(
                f"{self.checkpoints.path}: holds checkpoints of a run already; go on with resume='auto', or choose "
                "another output_dir"
            )
        seed_generators(self.config.seed + _RANK_SEEDS * self.processes.rank)
        if not has_checkpoints:
            self.judge.check()
        outcome, notes = self._go_on() if has_checkpoints else (None, [])
        tell(self.observers, Observer.start, self._plan())
        self._tell_notes(notes)
        return outcome

    def _go_on(self) -> tuple[str | None, list[str]]:
        """Takes up the newest checkpoint that is not damaged; returns how the run had ended, and what is to be told."""
        folder, processes = self.checkpoints, self.processes
        newest, damage = processes.on_main(folder.newest_intact)
        directory, state = folder.directory(newest), folder.state(newest)
        check_agreement(state.agreement, self.agreed, directory)
        num_saved = state.agreement.get("processes", processes.count)
        restore_run(directory, self.model, self.optimizer, processes, num_saved)
        self.progress, self.metrics = state.progress, state.metrics
        notes = [processes.on_main(partial(folder.set_aside, step, problem)) for step, problem in damage.items()]
        if num_saved != processes.count:
            notes.append(
                f"{processes.count} processes in place of {num_saved}: the same examples in "
                "every step, but sums of another order and other dropout, so not the same bits"
            )
        best = self.progress.best_step
        if best is not None and best != newest:
            problem = processes.on_main(partial(folder.damage, best, WEIGHTS))
            if problem is not None:
                notes.append(
                    f"{processes.on_main(partial(folder.set_aside, best, problem))}. These were the best weights: the "
                    "best of the evaluations to come will take their place, without any the last ones"
                )
                self.progress.forget_best()
        return state.outcome, [*notes, f"going on after step {newest}, from {directory}"]

    def _finish(self, outcome: str) -> TrainingResult:
        """Leaves the best weights in the model and in `model/`."""
        best = self.progress.best_step
        model_dir, metrics = self.config.output_dir / "model", self.metrics
        if not outcome.startswith("interrupted"):
            if best is not None and best != self.progress.step:
                metrics = self.processes.on_main(partial(self._check_best, best))
                load_weights(self.checkpoints.directory(best), self.model, self.processes)
            whole = whole_model(self.model, self.processes)
            self.processes.on_main(lambda: self._save_model(model_dir, whole))
        return TrainingResult(outcome, self.progress.step, metrics, self.progress.best_value, best, model_dir)

    def _check_best(self, best: int) -> dict[str, float]:
        """The metrics of the best weights; raises CheckpointError if their files are damaged."""
        problem = self.checkpoints.damage(best, WEIGHTS)
        if problem is not None:
            raise CheckpointError(
                f"{problem}; these were the best weights, and model/ was not written: the same command leaves the last "
                "ones there"
            )
        return self.checkpoints.state(best).metrics

    def _save_model(self, directory: Path, whole: Any) -> None:
        whole.save_pretrained(directory)
        self._save_companions(directory)

    def _save_companions(self, directory: Path) -> None:
        if self.setup.tokenizer is not None:
            self.setup.tokenizer.save_pretrained(directory)
        if self.setup.settings:
            text = json.dumps(self.setup.settings, indent=1, ensure_ascii=False) + "\n"
            # Of names of files that are not UTF-8: \udcff is how JSON writes what Python makes of such bytes.
            content = text.encode(errors="backslashreplace")
            write_atomically(directory / TASK_FILE, lambda path: path.write_bytes(content))

    def _plan(self) -> Plan:
        valid = self.task.valid
        flops = model_flops(self.model.config, type(self.model).__name__)
        return Plan(
            task=self.task.name,
            model=type(self.model).__name__,
            output_dir=self.config.output_dir,
            config=self.setup.settings or self.config.as_dict(),
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            num_examples=len(self.source.lengths(0)),
            num_valid_examples=0 if valid is None else len(valid.lengths(0)),
            steps=self.num_steps,
            steps_per_epoch=self.epoch_steps,
            first_step=self.progress.step,
            num_processes=self.processes.count,
            device=device_name(self.processes.device),
            flops_per_token=flops[0],
            flops_per_square=flops[1],
            metric=self.judge.metric,
            higher_is_better=self.judge.higher_is_better,
            classes=self.task.class_names(),
        )

    # The loop

    def _steps(self) -> str:
        """All steps from the present one on; returns the outcome."""
        if self.progress.step >= self.num_steps:
            return "finished"
        self.gradients = self._gradients()
        loader = BatchLoader(
            self.batches,
            share=self.share,
            rank=self.processes.rank,
            world_size=self.processes.count,
            start=self.progress.position,
            num_workers=self.config.num_workers,
            pin_memory=self.processes.device.type == "cuda",
        )
        self.setup.prepared.train()
        with StopSignals() as signals, contextlib.closing(loader), contextlib.closing(self.gradients):
            if self.processes.device.type == "cuda" and not self.processes.is_sharded:
                self._compile_kernels()
            while True:
                batches, wait = loader.next_step()
                outcome = self._step(batches, wait, signals)
                if outcome is not None:
                    return outcome

    def _gradients(self) -> Gradients:
        parts = self.task, self.setup.prepared, self.optimizer, self.processes
        if not self.config.graphs:
            return Gradients(*parts)
        epochs = -(-self.num_steps // self.epoch_steps)
        return ReplayedGradients(
            *parts, run_budgets(self.batches, epochs, self.model.config.max_position_embeddings)
        )  # fmt: skip

    def _compile_kernels(self) -> None:
        """What would otherwise happen when the first batch of each kind comes."""
        config, lengths, plan = self.config, self.source.lengths(0), self.batches.plan(0)
        longest = min(int(max(lengths)), self.model.config.max_position_embeddings)
        tokens = max(int(lengths[plan.indices(i)].sum()) for i in range(min(len(plan), _BATCHES_LOOKED_AT)))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        optimizer = self.optimizer.optimizer
        with self._pause(), explained("compiling kernels", lambda: f"with {tokens} tokens in a batch. {_LESS}"):
            compiled = partial(warm_up, self.model, autocast_dtype=dtype, max_seqlen=longest, progress=False)
            seconds = compiled(optimizer=optimizer, max_tokens=tokens, inference=False)
            if self.task.valid is not None:
                tokens = min(config.eval_batch_tokens, int(self.task.valid.lengths(0).sum()))
                seconds += compiled(max_tokens=tokens, training=False)
        if seconds > _WORTH_TELLING:
            tell(
                self.observers, Observer.note, f"compiled kernels for {seconds:.0f} s; the next run finds most of them"
            )

    def _step(self, batches: list[MicroBatch], wait: float, signals: StopSignals) -> str | None:
        """One step and what is due after it; returns the outcome if it was the last, or if a signal came before it."""
        number, place = self.progress.step + 1, batches[-1].place
        with explained(f"step {number}", lambda: smaller_steps(batches)):
            counts = [self._labels(one) for one in batches]
            asked = self.processes.sums(_summed(counts) | {"stop": float(signals.received is not None)})
            if asked["stop"]:
                return self._interrupted(signals.received or "a signal to another process")
            self.tally.count(batches, wait)  # before they are on the device, where counting would wait for it
            losses = self._learn(batches, counts, asked)
            self.tally.add(losses)
            self._note(number, losses, batches)
        ends_epoch, is_last = place.step + 1 == place.epoch_steps, number == self.num_steps
        self.progress.step = number
        self.progress.epoch, self.progress.epoch_step = place.epoch, place.step + 1
        if ends_epoch:
            self.progress.epoch, self.progress.epoch_step = place.epoch + 1, 0
        self.epochs = place.epoch + (place.step + 1) / place.epoch_steps
        evaluates = self.task.valid is not None and self._is_due(self.config.eval_every, ends_epoch, is_last)
        saves = self._saves and self._is_due(self.config.save_every, ends_epoch, is_last)
        if evaluates or saves or is_last or number % self.config.log_every == 0:
            self._look()
            self._report()
        outcome = "finished" if is_last else None
        with self._pause():
            if evaluates:
                saves = self._evaluate() or saves
                if outcome is None and self.judge.is_hopeless(self.progress):
                    outcome, saves = "stopped early", saves or self._saves
            if saves:
                self._save(outcome)
        return outcome

    def _interrupted(self, by: str) -> str:
        """Keeps what was done."""
        self._look()
        self._report()
        self._save(None)
        return f"interrupted: {by}"

    def _labels(self, one: MicroBatch) -> dict[str, float]:
        counts = self.task.label_counts(one.batch)
        return {name: 0.0 if one.place.is_spare else float(count) for name, count in counts.items()}

    def _learn(
        self, batches: list[MicroBatch], counts: list[dict[str, float]], totals: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Forward, backward and the optimizer's step; returns the weighted parts of the loss of this process."""
        rate = self.learning_rate(self.progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses: dict[str, Tensor] = {}
        for one, labels in zip(batches, counts, strict=True):
            # Gradients of processes are averaged, so that a part's weight is its share of an average process's.
            weights = {name: labels[name] * self.processes.count / max(totals[name], 1.0) for name in labels}
            for name, value in self.gradients.add(one, weights).items():
                losses[name] = losses[name] + value if name in losses else value
        self.optimizer.step()
        self.grad_norm = getattr(self.optimizer.optimizer, "grad_norm", None)
        self.gradients.clear()
        return losses

    # What happens after a step

    def _is_due(self, every: float | None, ends_epoch: bool, is_last: bool) -> bool:
        if every is None:
            return ends_epoch or is_last
        steps = max(1, round(every * self.num_steps)) if every < 1 else round(every)
        return is_last or self.progress.step % steps == 0

    def _note(self, number: int, losses: Mapping[str, Tensor], batches: list[MicroBatch]) -> None:
        """Has the step watched; on a CPU looks at once."""
        values = [total(losses.values())]
        if self.grad_norm is not None and self.processes.accelerator.scaler is None:  # which skips infinite gradients
            values.append(self.grad_norm)
        self.watch.note(number, values, batches)
        if self.processes.device.type == "cpu":
            self._look()

    def _look(self) -> None:
        kept = max(self.checkpoints.steps(), default=None)
        self.watch.look("no checkpoint was written yet" if kept is None else f"the last checkpoint is of step {kept}")

    def _examples(self, one: MicroBatch) -> list[int]:
        return self.batches.plan(one.place.epoch).indices(one.place.number).tolist()

    def _report(self) -> None:
        if self.tally.num_steps:
            rate = self.learning_rate(self.progress.step - 1)
            step = self.tally.report(self.progress.step, self.epochs, rate, self.grad_norm, self.paused)
            tell(self.observers, Observer.step, step)
            self._tell_notes(self.health.after_step(step))
            self.paused = 0.0

    def _evaluate(self) -> bool:
        """Judges the model; whether it is the best so far."""
        self.metrics, is_best = self.judge.judge(self.progress, self.epochs)
        self._tell_notes(self.health.after_evaluation(Evaluation(self.progress.step, self.epochs, self.metrics)))
        return is_best

    def _tell_notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            tell(self.observers, Observer.note, note)

    def _save(self, outcome: str | None) -> None:
        step = self.progress.step
        write = run_state(self.model, self.optimizer, self.processes)
        state = {
            "step": step,
            "outcome": outcome,
            "progress": self.progress.as_dict(),
            "metrics": self.metrics,
            "agreement": self.agreed,
        }

        def fill(directory: Path) -> dict[str, str]:
            digests = write(directory)
            self._save_companions(directory)
            return digests

        def save() -> Path:
            path = self.checkpoints.write(step, fill, state)
            self.checkpoints.prune(self.progress.best_step)
            return path

        tell(self.observers, Observer.checkpoint, step, self.processes.on_main(save))

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began


def _summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in counts) for name in counts[0]}
