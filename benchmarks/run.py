"""Runs benchmark cases, prints a line for each, appends JSON lines to `benchmarks/results/`.

python -m benchmarks.run                      every case of registry.py
python -m benchmarks.run --only minilm        cases whose name contains a text
python -m benchmarks.run --list
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.components import COMPONENTS
from benchmarks.kernels import KERNEL_CASES, run_kernel_case
from benchmarks.models import run_case, saved_bytes_per_layer
from benchmarks.registry import CASES

Job = Callable[[], dict[str, object]]
RESULTS = Path(__file__).resolve().parent / "results"


def environment() -> dict[str, object]:
    """What a figure depends on: commit, processor, threads, versions, time."""
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of every contestant")
    parser.add_argument("--batches", type=int, default=2, help="batches of 32 in every round")
    parser.add_argument("--gemm", choices=("default", "mkl"), default="default", help="library of the linear layers")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        return _run(_gpu_jobs(), RESULTS / f"{_slug(torch.cuda.get_device_name())}.jsonl", arguments)
    return _run(_cpu_jobs(arguments.rounds, arguments.batches, arguments.gemm), RESULTS / "cpu.jsonl", arguments)


def _gpu_jobs() -> dict[str, Job]:
    return {case.name: (lambda case=case: run_kernel_case(case, torch.device("cuda"))) for case in KERNEL_CASES}


def _cpu_jobs(rounds: int, batches: int, gemm: str) -> dict[str, Job]:
    jobs: dict[str, Job] = {case.name: (lambda case=case: run_case(case, rounds, batches, gemm)) for case in CASES}
    jobs |= {"saved_bytes_per_layer": saved_bytes_per_layer}
    jobs |= {name: (lambda run=run: run(rounds)) for name, run in COMPONENTS.items()}
    return jobs


def _slug(name: str) -> str:
    """A file name from a GPU's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _run(jobs: dict[str, Job], results: Path, arguments: argparse.Namespace) -> int:
    jobs = {name: job for name, job in jobs.items() if arguments.only in name}
    if arguments.list:
        print("\n".join(jobs))
        return 0
    surroundings = environment()
    for name, job in jobs.items():
        result = job()
        shown = {key: value for key, value in result.items() if key != "case" and not isinstance(value, list)}
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        if not arguments.dry_run:
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(surroundings | result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
