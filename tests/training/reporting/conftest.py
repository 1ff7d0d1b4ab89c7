"""Runs that nobody trained: plans, steps and evaluations as the trainer would tell them."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_fast.training.observers import Evaluation, Observer, Plan, Step
from bert_fast.training.reporting import MetricsLog, RunDirectory

HOSTILE = "<script>alert('x')</script> & [red]markup[/red]"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        task="pretrain",
        model="BertForPreTraining",
        output_dir=tmp_path / "run",
        config={"precision": "bf16", "learning_rate": 1e-4, "log_every": 10, "betas": [0.9, 0.999], "seed": None},
        num_parameters=110_106_428,
        num_examples=1000,
        num_valid_examples=100,
        steps=100,
        steps_per_epoch=50,
        first_step=0,
        num_processes=1,
        device="NVIDIA H200",
        flops_per_token=6e8,
        flops_per_square=1e5,
        metric="loss",
        higher_is_better=False,
    )


def make_step(step: int, **changes: Any) -> Step:
    value = 2 + 8 * math.exp(-step / 20)
    made = Step(
        step=step, epoch=step / 50, num_steps=1,
        losses={"masked_lm": value, "next_sentence": 0.5, "loss": value + 0.5},
        learning_rate=1e-4 * (1 - step / 5000), grad_norm=1.0, tokens=16_000, squares=16_000 * 100, sequences=160,
        capacity_tokens=16_384, seconds=0.1, wait_seconds=0.0, memory_bytes=2 * 10**9,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_evaluation(step: int, is_best: bool = True, **metrics: float) -> Evaluation:
    values = {"loss": 2.6, "masked_lm": 2.1, "accuracy": 0.75, "unigram_entropy": 6.87} | metrics
    return Evaluation(step, step / 50, values, is_best, 1.5, 5000)


@pytest.fixture
def record_run(plan: Plan) -> Callable[..., RunDirectory]:
    """Writes a run of given steps and evaluations down; returns its directory."""

    def record(
        steps: list[Step], evaluations: tuple[Evaluation, ...] = (), outcome: str | None = "finished", **changes: Any
    ) -> RunDirectory:
        told = dataclasses.replace(plan, **changes)
        run = RunDirectory(told.output_dir)
        observers: list[Observer] = [run, MetricsLog(run.metrics)]
        for observer in observers:
            observer.start(told)
            for event in sorted((*steps, *evaluations), key=lambda event: event.step):
                observer.step(event) if isinstance(event, Step) else observer.evaluation(event)
            observer.checkpoint(told.first_step, run.checkpoints / "step-00000000")
            observer.note(HOSTILE)
            if outcome is not None:
                observer.end(outcome)
        return run

    return record
