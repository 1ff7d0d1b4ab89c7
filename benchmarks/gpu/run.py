"""What a run of `make gpu` tells the processes of its parts, in a file; and how it begins, on which device.

Importing this module imports no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.record import ROOT, Recorder

# Set by a user for other runs; here they would change what is measured.
CLEARED_VARIABLES = ("BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "BERT_FAST_NATIVE", "TRITON_INTERPRET")
# What compilers keep on disk: below the project unless a user says otherwise, so that it goes where a copy goes.
CACHE = ROOT / "build" / "gpu_cache"
CACHE_VARIABLES = {"TRITON_CACHE_DIR": CACHE / "triton", "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor"}


@dataclass(frozen=True)
class Run:
    """One run of `make gpu`: where results go, what stands in every line, and on what device which cases run.

    device: "cuda", or "cpu" for tests; size: of the cases, as `registry.kernel_cases` has it.
    compile_backend: of torch.compile; rounds: counted rounds of every contestant, None for the usual number.
    families: whose kernel cases run; None for all there are.
    """

    results: str
    shared: dict[str, Any]
    device: str = "cuda"
    size: str = "gpu"
    compile_backend: str = "inductor"
    rounds: int | None = None
    families: Sequence[str] | None = None

    @classmethod
    def read(cls, path: Path) -> "Run":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.__dict__))

    @property
    def recorder(self) -> Recorder:
        return Recorder(Path(self.results), self.shared)


_PROBE = """
import json, sys, torch
from benchmarks.kit.record import gpu_environment
from benchmarks.registry import family_names
if torch.cuda.is_available():
    print(json.dumps([gpu_environment("cuda", sys.argv[1] or None), list(family_names())]))
"""


def probe(commit: str | None) -> tuple[dict[str, Any], list[str]] | None:
    """(what stands in every line, names of families); None without a device. This process stays without torch."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, commit or ""], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit("the benchmarks could not be imported: the reason is above")
    answer = done.stdout.strip().splitlines()[-1:]
    return tuple(json.loads(answer[0])) if answer else None


def process_environment() -> dict[str, str]:
    """Variables of a process that measures, or compiles for one that does."""
    cleared = {key: value for key, value in os.environ.items() if key not in CLEARED_VARIABLES}
    return {key: str(path) for key, path in CACHE_VARIABLES.items()} | cleared


def chosen(what: str, names: str | None, known: Iterable[str]) -> list[str]:
    """The names of a list "a,b" in the order of those there are; all of them for None. SystemExit names a wrong one."""
    there = list(known)
    wanted = there if names is None else names.split(",")
    if wrong := [name for name in wanted if name not in there]:
        raise SystemExit(f"--{what}: expected some of {','.join(there)}, got {','.join(wrong)}")
    return [name for name in there if name in wanted]
