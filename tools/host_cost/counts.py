"""Runs the steps under callgrind and adds up what it wrote, without the arithmetic of PyTorch's CPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.host_cost import build

__all__ = ["Counts", "count"]

ROOT = Path(__file__).resolve().parents[2]
# Loops over elements: functions of a namespace for each instruction set, what TensorIterator calls for a row of
# elements, and what copies or fills memory. All else of an operator counts: dispatcher, checks, allocation, set-up.
_ARITHMETIC = re.compile(
    r"at::native::(\(anonymous namespace\)::)?(AVX2|AVX512|DEFAULT)::|callback_fn<|vec::|cpublas|mkldnn|dnnl|mkl_|gemm"
    r"|^_*(memcpy|memset|memmove)|[kK]ernel_?[iI]mpl|Sleef|random64|softmax_lastdim|log_softmax|cpu_adam|cpu_index|philox|mt19937|bernoulli|_sort|stable"
)
Counts = dict[str, int]  # "case, precision, kind, layers, part" -> instructions


def count(cases: Sequence[str], precisions: Sequence[str]) -> Counts:
    """Instructions of each part of each step."""
    build.requests(), build.products()  # compilers are not to run under callgrind
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "setarch", "-R", "valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
            f"--callgrind-out-file={folder}/out", sys.executable, "-m", "tools.host_cost.child", ",".join(cases),
            ",".join(precisions),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "pymalloc"}
        run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        labels = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
        return {
            ", ".join(map(str, label)): _total(Path(folder) / f"out.{number}") for number, label in enumerate(labels, 1)
        }


def _total(path: Path) -> int:
    """Instructions of all functions but those of `_ARITHMETIC`."""
    names: dict[str, str] = {}
    total, is_counted, is_call = 0, True, False
    with path.open(errors="replace") as lines:
        for line in lines:
            if line.startswith("fn="):
                number, _, name = line[3:].rstrip().partition(" ")
                if name:
                    names[number] = name
                is_counted = _ARITHMETIC.search(names.get(number, "")) is None
            elif line.startswith("cfn="):
                number, _, name = line[4:].rstrip().partition(" ")
                if name:
                    names[number] = name
            elif line.startswith("calls="):
                is_call = True  # the next line is what the callee cost
            elif line[:1].isdigit() or line[:1] in "+-*":
                if not is_call and is_counted:
                    total += int(line.split()[1])
                is_call = False
    return total
