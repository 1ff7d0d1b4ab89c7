"""Runs benchmark cases, prints a table, appends JSON lines to `benchmarks/results/`.

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
from pathlib import Path

import torch

from benchmarks.components import COMPONENTS
from benchmarks.models import run_case, saved_bytes_per_layer
from benchmarks.registry import CASES

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
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    arguments = parser.parse_args()
    jobs = {case.name: (lambda case=case: run_case(case, arguments.rounds, arguments.batches)) for case in CASES}
    jobs |= {"saved_bytes_per_layer": saved_bytes_per_layer}
    jobs |= {name: (lambda run=run: run(arguments.rounds)) for name, run in COMPONENTS.items()}
    jobs = {name: job for name, job in jobs.items() if arguments.only in name}
    if arguments.list:
        print("\n".join(jobs))
        return 0
    surroundings = environment()
    for name, job in jobs.items():
        result = job()
        shown = {key: value for key, value in result.items() if not key.endswith("_s") or isinstance(value, float)}
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items() if key != "case"), flush=True)
        if not arguments.dry_run:
            with open(RESULTS / "cpu.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(surroundings | result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
