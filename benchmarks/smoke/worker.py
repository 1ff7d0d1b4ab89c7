"""A process of `make gpu-smoke`: the cases of one family, one after the other, each told as soon as it is through.

    python -m benchmarks.smoke.worker --family NAME [--device DEVICE] [--size smoke] [--only JSON] [--share I/N]

Writes lines of JSON to its standard output: {"cases": [names]}, then for each {"begin": name} and {"case": name, ...};
what libraries print goes to standard error. --only: names of the cases to run, all by default; --share: every Nth of
them, from number I on. Ends with status 3 where a case has left the device unusable. Family "environment" tells what
the run depends on.

A device that `tools.null_driver` knows by name ("sm_90") stands for its null driver: kernels are compiled and launched
and nothing runs.
"""

import argparse
import json
import os
import sys
import time
from typing import IO, Any

from benchmarks.kit.crashes import is_usable, leave

ENVIRONMENT = "environment"


def _answers() -> IO[str]:
    """Standard output for our lines alone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _environment(device: str, commit: str | None) -> dict[str, Any] | None:
    """What stands in every line, and what is shown once; None without the device."""
    import torch

    from benchmarks.kit.record import gpu_environment
    from bert_fast.devices import assembler

    if device == "cuda" and not torch.cuda.is_available():
        return None
    found = gpu_environment("cuda" if device == "cuda" else "cpu", commit)
    capability = ptxas = None
    if device.startswith("sm_") or (device == "cuda" and torch.version.hip is None):
        major, minor = torch.cuda.get_device_capability() if device == "cuda" else (int(device[3:-1]), int(device[-1]))
        capability = f"{major}.{minor}"
        ptxas = (assembler((major, minor)) or "").removeprefix("ptxas ") or None
    return found | {"capability": capability, "ptxas": ptxas}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--family", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--only", type=json.loads)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    answers = _answers()

    def tell(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    if options.family == ENVIRONMENT:
        tell(environment=_environment(options.device, options.commit))
        return 0
    is_dry = options.device.startswith("sm_")
    if is_dry:
        from benchmarks.smoke.dry import start

        start(options.device)
    import torch

    from benchmarks.smoke.check import run, smoke_cases
    from benchmarks.smoke.compiled import CompiledKernels

    device, compiled = torch.device("cpu" if is_dry else options.device), CompiledKernels()
    cases = smoke_cases(options.family, options.size, is_dry)
    first, step = map(int, options.share.split("/"))
    cases = [case for case in cases[first::step] if options.only is None or case.name in options.only]
    tell(cases=[case.name for case in cases])
    for case in cases:
        tell(begin=case.name)
        begin = time.monotonic()
        fields = run(case, device, compiled)
        usable = is_usable(device)
        fields |= {} if usable else {"outcome": "crash"}
        tell(case=case.name, **fields, seconds=round(time.monotonic() - begin, 2))
        if not usable:
            leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
