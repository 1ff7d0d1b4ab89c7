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

from benchmarks.kit.results import ROOT, Recorder

# Set by a user for other runs; here they would change what is measured.
CLEARED_VARIABLES = (
    "BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "BERT_FAST_NATIVE", "CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET",
)  # fmt: skip
# What compilers keep on disk: below the project unless a user says otherwise, so that it goes where a copy goes.
CACHE = ROOT / "build" / "gpu_cache"
CACHE_VARIABLES = {"TRITON_CACHE_DIR": CACHE / "triton", "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor"}
PROBE_S = 180.0  # in which a device says what it is; on a machine that was just started, torch alone takes a minute


@dataclass(frozen=True)
class Run:
    """One run of `make gpu`: where results go, what stands in every line, and on what device which cases run.

    device: "cuda", "cpu" (for tests), or one that `tools.null_driver` knows; size: of the cases, "gpu" or "small".
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


def probe(device: str, commit: str | None) -> dict[str, Any] | None:
    """What stands in every line, asked of another process: this one stays without torch. None without the device."""
    ask = "import json, sys; from benchmarks.gpu.run import environment; print(json.dumps(environment(*sys.argv[1:])))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ask, device, commit or ""], cwd=ROOT, env=process_environment(),
            stdout=subprocess.PIPE, text=True, check=False, timeout=PROBE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the device has not said what it is within {PROBE_S:.0f} s: nothing was run") from None
    if done.returncode != 0:
        raise SystemExit("the benchmarks could not be imported: the reason is above")
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def environment(device: str, commit: str) -> dict[str, Any] | None:
    """What `probe` returns."""
    import torch

    from benchmarks.kit.results import gpu_environment
    from bert_fast.devices import assembler

    if device == "cuda" and not torch.cuda.is_available():
        return None
    found = gpu_environment("cuda" if device == "cuda" else "cpu", commit or None)
    capability = (int(device[3:-1]), int(device[-1])) if is_dry(device) else None
    if device == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
    if capability is None:
        return found | {"capability": None, "ptxas": None}
    ptxas = (assembler(capability) or "").removeprefix("ptxas ") or None
    return found | {"capability": "{}.{}".format(*capability), "ptxas": ptxas}


def is_dry(device: str) -> bool:
    """Whether the null driver stands for a device ("sm_90"): kernels are compiled and launched, and nothing runs."""
    return device.startswith("sm_")


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
