"""`Trainer`: a model, a task and a configuration, to train, to judge and to ask."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from bert_fast.data.batches import Source, check_source
from bert_fast.env import bound_kernel_cache
from bert_fast.training.config import TrainingConfig
from bert_fast.training.distributed import Processes
from bert_fast.training.evaluation import run_over
from bert_fast.training.failures import explained
from bert_fast.training.gradients import check_replayable
from bert_fast.training.loop import Run, Setup, TrainingResult
from bert_fast.training.observers import Observer, tell
from bert_fast.training.optimization import make_optimizer
from bert_fast.training.reporting import default_observers
from bert_fast.training.task import Predictions, Task

__all__ = ["Trainer", "TrainingResult"]


class Trainer:
    """Trains a model on a task, from the first step or from where an earlier run of the same settings was.

    Same model, task, configuration and number of processes: the same bits, interrupted or not. Several processes, by
    `torchrun` or `accelerate launch`, compute what one does with as many micro-batches more (but for their dropout).

    model: of `bert_fast.models` (or, to fine-tune, one that `fuse` changed); it is moved, and trained in place.
    task: examples, loss and metrics. config: how. tokenizer: saved beside the weights, if given.
    observers: are told what happens; None: `reporting.default_observers`.
    settings: plain values that say how model and task were made, kept with the run (in place of config.as_dict())
        and, as bert_fast_task.json, beside the weights.

    Making one writes nothing. Raises: TypeError, ValueError naming the argument; ImportError without accelerate.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        config: TrainingConfig,
        *,
        tokenizer: Any = None,
        observers: Sequence[Observer] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(task, Task):
            raise TypeError(f"task: expected a Task, got {type(task).__name__}")
        if not isinstance(config, TrainingConfig):
            raise TypeError(f"config: expected a TrainingConfig, got {type(config).__name__}")
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise TypeError(f"model: expected one of bert_fast.models, or a fused one, got {type(model).__name__}")
        if settings is not None and not isinstance(settings, Mapping):
            raise TypeError(f"settings: expected a mapping, got {type(settings).__name__}")
        if observers is not None and (isinstance(observers, str) or not isinstance(observers, Sequence)):
            raise TypeError(f"observers: expected a list, got {type(observers).__name__}")
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise TypeError(f"tokenizer: expected one with save_pretrained, got {type(tokenizer).__name__}")
        # Absolute: whoever changes the working directory during the run does not divide it.
        self.config = replace(config, output_dir=config.output_dir.absolute())
        self.task, self.tokenizer = task, tokenizer
        self.settings = dict(settings or {})
        self.processes = Processes(config)
        if config.graphs:
            check_replayable(model)
        if self.processes.device.type == "cpu":
            bound_kernel_cache()
        self.model = self.processes.place(model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.prepared, self.optimizer = self.processes.prepare(self.model, make_optimizer(self.model, config))
        if observers is None:
            observers = default_observers(self.config.output_dir)
        self.observers = list(observers) if self.is_main else []

    @property
    def is_main(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.processes.is_main

    @property
    def setup(self) -> Setup:
        """What a run needs."""
        return Setup(
            task=self.task,
            config=self.config,
            model=self.model,
            prepared=self.prepared,
            optimizer=self.optimizer,
            processes=self.processes,
            observers=self.observers,
            evaluate=self.evaluate,
            tokenizer=self.tokenizer,
            settings=self.settings,
        )

    def evaluate(self, source: Source | None = None) -> dict[str, float]:
        """Loss and metrics over `source`, or over the task's examples to judge by; the same in every process.

        Raises: ValueError: there are none.
        """
        source = self.task.valid if source is None else check_source("source", source)
        if source is None or not len(source.lengths(0)):
            raise ValueError("source: expected examples to judge by, got none")
        predictions, metrics = self._run_over(source)
        return self.processes.on_main(lambda: metrics | self.task.score(source, predictions))

    def predict(self, source: Source) -> Predictions:
        """What the model says about every example; complete in the main process."""
        return self._run_over(check_source("source", source))[0]

    def train(self, resume: str = "auto") -> TrainingResult:
        """Trains to the end and leaves the best weights in the model and in `<output_dir>/model`.

        resume: "auto" goes on from the newest checkpoint where there is one, "must" raises without one, "never" where
            there is one.

        Raises:
            CheckpointError: a checkpoint is damaged, of another run, or cannot be written.
            TrainingError: another run writes into output_dir; the loss is not a number, memory ran out, or another
                process is gone.
            ValueError: the task has no examples to train on.
        """
        return Run(self.setup).train(resume)

    def _run_over(self, source: Source) -> tuple[Predictions, dict[str, float]]:
        was_training = self.model.training
        self.model.eval()
        tokens = self.config.eval_batch_tokens
        try:
            with explained("evaluation", lambda: f"with {tokens} tokens in a batch. Lower eval_batch_tokens"):
                return run_over(self.task, self.model, source, self.processes, tokens, self._watch)
        finally:
            self.model.train(was_training)

    def _watch(self, done: int, batches: int) -> None:
        tell(self.observers, Observer.evaluating, done, batches)
