"""Runs every Triton kernel on a CPU by the PTX that it is compiled to, and compares what it makes with fp64.

    python -m tools.witness                      small cases of all families, for sm_90; what is wrong is red
    python -m tools.witness --family attention   of one family (may be given repeatedly)
    python -m tools.witness --device sm_80       or sm_90
    python -m tools.witness --record             cases of kernels that are not those of the record, and writes it
    python -m tools.witness --record --all       all cases, and writes it

docs/witness.md says what that shows and what it does not.
"""

import argparse
import importlib.util
import os
import sys
import time
import warnings
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
    parser.add_argument("--record", action="store_true", help="run what the record has not, and write it")
    parser.add_argument("--all", action="store_true", help="with --record, run everything")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed: there is nothing to compile kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    if arguments.record and (arguments.family or arguments.only):
        parser.error("--record chooses families and cases itself")
    return arguments


def run_cases(device: str, families: list[str], only: str = "") -> list[dict[str, Any]]:
    """A line for every case of these families: what `check_case` says, programs that were run, seconds.

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
    for case in kernel_cases(Use.SMALL | Use.WITNESS, families):
        if only in case.name:
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
    from bert_fast.testing.compare import comparisons
    from tools.witness.launch import witness
    from tools.witness.record import figures

    start = time.monotonic()
    with witness(DEVICES[device]) as found, comparisons() as compared:
        line = check_case(case, torch.device("cpu"))
    wrong = [one.wrong for one in compared if one.wrong]
    if wrong and not line["error"]:
        line |= {"ok": False, "error": f"wrong: {'; '.join(wrong)}"}
    # Kernels of what is verified too: a case may do nothing else.
    line["kernels"] = found.kernels
    line |= {"programs": found.num_programs, "seconds": round(time.monotonic() - start, 1)}
    return line | figures(compared)


def main() -> int:
    """Command line; 1 if a case is wrong."""
    options = _arguments()
    import triton

    from benchmarks.families import family_names
    from tools.witness import record

    families = options.family or family_names()
    run = record.run_of(options.device, triton.__version__)
    if options.record and not options.all:
        families = record.stale_families(run, triton.__version__)
        if not families:
            print(f"all kernels were run as they are: {run}")
            return 0
    lines = run_cases(options.device, families, options.only)
    if options.record:
        record.write(run, triton.__version__, lines, families)
    red = [line["case"] for line in lines if not line["ok"]]
    print(f"{len(lines)} cases, {sum(line['programs'] for line in lines)} programs; red: {', '.join(red) or 'none'}")
    return 1 if red or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
