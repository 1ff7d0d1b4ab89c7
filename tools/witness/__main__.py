"""Runs every Triton kernel on a CPU by the PTX that it is compiled to, and compares what it makes with fp64.

    python -m tools.witness                      small cases of all families, for sm_90; what is wrong is red
    python -m tools.witness --family attention   of one family (may be given repeatedly)
    python -m tools.witness --device sm_80       or sm_90
    python -m tools.witness --record             writes down which kernels were run, from which source
    python -m tools.witness --record --changed   the same, of cases whose kernels are not as the record has them

docs/witness.md says what that shows and what it does not.
"""

import argparse
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

DEVICES = {"sm_80": 80, "sm_90": 90}
_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
_MULTIPROCESSORS = 4  # programs that persistent kernels start: enough for each to have several rounds


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.witness", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="sm_90", help="compiled for; default: %(default)s")
    parser.add_argument("--family", action="append", default=[], help="this op family only")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this text")
    parser.add_argument("--record", action="store_true", help="write down what was run")
    parser.add_argument(
        "--changed", action="store_true", help="cases that the record lacks, or has of other sources or another Triton"
    )
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed: there is nothing to compile kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    if arguments.record and (arguments.family or arguments.only):
        parser.error("--record writes all families")
    return arguments


def run_cases(
    device: str, families: list[str], only: str = "", is_known: Callable[[str], bool] = lambda name: False
) -> list[dict[str, Any]]:
    """A line for every case but those that `is_known` names: what `check_case` says, programs that were run, seconds.

    Once a process, before bert_fast is imported: it takes CPU tensors for a GPU's afterwards.
    """
    from tools.null_driver import device_answers

    device_answers.install(DEVICES[device], _MULTIPROCESSORS, _SHARED_BYTES[device], has_products=True)
    import torch

    from benchmarks.kernels.case import Use
    from benchmarks.registry import kernel_cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    for case in kernel_cases(Use.SMALL | Use.WITNESS, families or None):
        if only in case.name and not is_known(case.name):
            line = run_case(case, device)
            print(
                f"{'ok ' if line['ok'] else 'RED'} {line['case']}: {line['programs']} programs, {line['seconds']} s, "
                f"{line['output']} at {line['share']} of what is allowed"
            )
            if line["error"]:
                print(f"    {line['error']}")
            sys.stdout.flush()
            lines.append(line)
    return lines


def run_case(case: Any, device: str) -> dict[str, Any]:
    """What `check_case` says of a `KernelCase`, programs that were run, seconds, and errors (`record.figures`)."""
    import torch

    from benchmarks.kernels.timing import check_case
    from benchmarks.kit.programs import kernel_digests
    from bert_fast.testing.compare import comparisons
    from tools.witness.launch import witness
    from tools.witness.record import figures

    start, hashes = time.monotonic(), kernel_digests()
    with witness(DEVICES[device]) as found, comparisons() as compared:
        line = check_case(case, torch.device("cpu"))
    wrong = [one.wrong for one in compared if one.wrong]
    if wrong and not line["error"]:
        line |= {"ok": False, "error": f"wrong: {'; '.join(wrong)}"}
    # Kernels of what is verified too: a case may do nothing else.
    line["kernels"] = {name: hashes[name] for name in found.kernels}
    line |= {"programs": found.num_programs, "seconds": round(time.monotonic() - start, 1)}
    return line | figures(compared)


def main() -> int:
    """Command line; 1 if a case is wrong."""
    options = _arguments()
    import triton

    from tools.witness import record

    known = record.up_to_date(options.device, triton.__version__) if options.changed else set()
    lines = run_cases(options.device, options.family, options.only, known.__contains__)
    if options.record:
        record.write(options.device, triton.__version__, lines, known)
    red = [line["case"] for line in lines if not line["ok"]]
    print(f"{len(lines)} cases, {sum(line['programs'] for line in lines)} programs; red: {', '.join(red) or 'none'}")
    return 1 if red or not (lines or known) else 0


if __name__ == "__main__":
    sys.exit(main())
