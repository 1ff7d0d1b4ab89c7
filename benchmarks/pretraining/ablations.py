"""Short runs of the recipe that differ in one part each: what a part is worth, and that it works at all.

Every run is the command line's, in a process of its own (or two), on one thread.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.record import ROOT
from benchmarks.pretraining.setting import MODEL, TRAIN, VALID
from benchmarks.recipes.data import PREPARED, books_vocabulary
from bert_fast.training.reporting import read_metrics

STEPS = 600
_COMMON = {
    "max-length": "64", "batch-tokens": "1024", "gradient-accumulation": "2", "learning-rate": "2e-3", "warmup": "0.1",
    "log-every": "20", "eval-every": "0.25", "keep-checkpoints": "1",
}  # fmt: skip
# Flags that differ from the run called "as in the recipe".
PARTS: dict[str, dict[str, str]] = {
    "as in the recipe": {},
    "initializer_range 0.02": {"model": "initializer_range=0.02"},
    "dropout 0.1": {"model": "hidden_dropout_prob=0.1 attention_probs_dropout_prob=0.1"},
    "whole words": {"whole-words": "true"},
    "no next sentences": {"next-sentence": "false"},
    "LAMB": {"optimizer": "lamb", "learning-rate": "2e-2"},
    "LAMB, learning rate 5e-3": {"optimizer": "lamb", "learning-rate": "5e-3"},
    "bf16": {"precision": "bf16"},
    "two processes": {"gradient-accumulation": "1"},
    "two phases, interrupted": {"long-length": "128", "long-share": "0.2"},
    "learning rate 10 times as high": {"learning-rate": "2e-2"},
}


def ablations(names: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """The lines to store, run by run: name, flags, curve ([step, masked_lm of training]), evaluations, seconds.

    Raises:
        KeyError: no such run. SystemExit: a run failed; with its last words.
    """
    for name in names:
        flags = PARTS[name]
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            _train(Path(folder), name, flags, steps)
            seconds = time.perf_counter() - began
            lines = _lines(Path(folder))
        yield {
            "name": name,
            "flags": flags,
            "steps": steps,
            "seconds": round(seconds, 1),
            "curve": [
                [line["step"], round(line["losses"]["masked_lm"], 4)] for line in lines if line["kind"] == "step"
            ],
            "evaluations": [
                {"step": line["step"]} | {key: round(value, 4) for key, value in line["metrics"].items()}
                for line in lines
                if line["kind"] == "evaluation"
            ],
            "notes": [line["text"] for line in lines if line["kind"] == "note"],
        }


def _train(folder: Path, name: str, flags: dict[str, str], steps: int) -> None:
    count = 2 if name == "two processes" else 1
    launcher = [sys.executable]
    if count > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    options = _COMMON | flags | {"steps": str(steps), "output-dir": str(folder / "run")}
    options["model"] = str(_model(folder, flags.get("model", "")))
    options |= {"tokenizer": str(books_vocabulary(PREPARED)), "train": str(TRAIN), "valid": str(VALID)}
    command = [*launcher, "-m", "bert_fast", "pretrain", "--quiet"]
    for flag, value in options.items():
        command += {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}.get(value, [f"--{flag}", value])
    if "interrupted" in name:
        _interrupted(command, folder / "run", steps)
    _finished(subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False))


def _model(folder: Path, changes: str) -> Path:
    """The recipe's configuration with other values of some fields."""
    import json

    values = json.loads(MODEL.read_text(encoding="utf-8"))
    values |= {name: float(value) for name, value in (one.split("=") for one in changes.split())}
    path = folder / "model.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def _interrupted(command: list[str], run: Path, steps: int) -> None:
    """Starts a run and ends it by SIGTERM in the middle of its first phase."""
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        metrics = run / "length-64" / "metrics.jsonl"
        lines = read_metrics(metrics) if metrics.exists() else []
        if max((line["step"] for line in lines), default=0) >= steps // 3:
            process.send_signal(signal.SIGTERM)
            process.wait()
        time.sleep(0.2)
    if process.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"expected to be interrupted, ended with status {process.returncode}")


def _finished(done: "subprocess.CompletedProcess[str]") -> None:
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Of both phases, one after the other, with steps counted through."""
    found, before = [], 0
    for directory in (folder / "run" / "length-64", folder / "run" / "length-128", folder / "run"):
        if not (directory / "metrics.jsonl").exists():
            continue
        lines = read_metrics(directory / "metrics.jsonl")
        found += [line | {"step": line["step"] + before} for line in lines]
        before = max(line["step"] for line in found)
    return found
