"""The directory of a run: where everything is, and what was run there, when, and on what."""

import datetime
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bert_fast._version import __version__
from bert_fast.errors import SourceError
from bert_fast.files import path_name, write_atomically
from bert_fast.training.observers import Observer, Plan

__all__ = ["RunDirectory", "available_cores", "device_name", "processor_name", "versions"]

_README = """\
This directory holds one training run of bert_fast.

report.html     the run as a page: curves, figures, settings. Open it in a browser; it needs no network.
                `bert-fast report DIRECTORY` makes it again.
metrics.jsonl   what the run did, one JSON object a line: steps, evaluations, checkpoints, notes. Plots and the
                report are drawn from it. bert_fast.training.reporting.read_metrics reads it.
run.json        what was run: command line, versions, machine, and when it started, went on and ended.
config.yaml     the settings. The same command (bert-fast pretrain, bert-fast finetune TASK) with --config config.yaml
                repeats the run.
model/          the trained model with its tokenizer, for from_pretrained: that of the best evaluation, else the last.
predictions/    what the model says about the examples to judge by.
checkpoints/    states to go on from: model, optimizer, random numbers. The newest, and the best. Only a run that
                is to go on needs them.
tensorboard/    the curves for TensorBoard: tensorboard --logdir DIRECTORY
failed_batch/   only after a loss that was not finite: the batch that it came from.
tokens/         tokens of the examples, made once. May be deleted; they are made again when they are needed.

Pre-training in two phases makes a directory like this one for each, length-128/ and length-512/.
"""


class RunDirectory(Observer):
    """The paths of a run, and run.json, config.yaml and README.txt in it, whose text says what is where.

    Attributes:
        path: the directory; made when the run starts.
        run_json, config, metrics, report, tensorboard, checkpoints, model, predictions, failed_batch: paths in it.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(path_name("output_dir", output_dir))
        self.run_json = self.path / "run.json"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"  # what `MetricsLog` writes
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.predictions = self.path / "predictions"
        self.failed_batch = self.path / "failed_batch"
        self._has_begun = False

    def start(self, plan: Plan) -> None:
        """Writes the three files; where the run goes on, run.json keeps the starts before."""
        self.path.mkdir(parents=True, exist_ok=True)
        starts = []
        if plan.first_step > 0 and self.run_json.exists():
            starts = self.read()["starts"]
        start = {
            "time": _now(),
            "first_step": plan.first_step,
            "command": shlex.join(sys.orig_argv),
            "directory": str(Path.cwd()),
            "versions": versions(),
            "machine": {
                "device": plan.device,
                "processes": plan.num_processes,
                "processor": processor_name(),
                "cores": available_cores(),
                "system": platform.platform(),
            },
            "ended": None,
            "outcome": None,
        }
        shown = {**asdict(plan), "output_dir": str(plan.output_dir)}
        self._write({"plan": shown, "starts": [*starts, start]})
        self._has_begun = True
        _write_text(self.config, _yaml(plan.config))
        _write_text(self.path / "README.txt", _README)

    def end(self, outcome: str) -> None:
        """Notes when and how the run ended; not of one that was refused before its start."""
        if self._has_begun:
            stored = self.read()
            stored["starts"][-1].update(ended=_now(), outcome=outcome)
            self._write(stored)

    def read(self) -> dict[str, Any]:
        """run.json: "plan" (the fields of `observers.Plan`) and "starts" (one for each time that the run was started).

        Raises:
            SourceError: it is missing or damaged.
        """
        try:
            stored = json.loads(self.run_json.read_text(encoding="utf-8"))
            starts = stored.get("starts")
            if not isinstance(stored.get("plan"), dict) or not isinstance(starts, list) or not starts:
                raise ValueError("expected an object with plan and starts")
            if not all(isinstance(start, dict) for start in starts):
                raise ValueError("starts: expected a list of objects")
        except FileNotFoundError as error:
            raise SourceError(f"{self.path}: expected the directory of a run, but it holds no run.json") from error
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise SourceError(f"{self.run_json}: cannot be read: {error}") from error
        return stored

    def _write(self, content: dict[str, Any]) -> None:
        _write_text(self.run_json, json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")


def _write_text(path: Path, text: str) -> None:
    # Names of files may hold bytes that are not UTF-8: \udcff is also how JSON writes what Python makes of them.
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")

    write_atomically(path, write)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _yaml(values: dict[str, Any]) -> str:
    """As YAML; without PyYAML in the form of JSON, which is YAML, too."""
    plain = json.loads(json.dumps(values, default=str))
    try:
        import yaml
    except ImportError:
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def processor_name() -> str:
    """Of the first processor, as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Of a device that a model runs on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {processor_name()}, {available_cores()} cores"


def versions(packages: tuple[str, ...] = ("torch", "triton", "numpy", "accelerate")) -> dict[str, str]:
    """Of bert_fast, Python and those of the packages that are installed."""
    found = {"bert_fast": __version__, "Python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
