"""Counts what steps of BERT launch, and times what they cost the host, over a CUDA driver that runs nothing.

    python -m tools.null_driver            launches, small launches and Python calls, beside tests/launches.json
    python -m tools.null_driver --record   writes them down
    python -m tools.null_driver --host     microseconds of the host, in turn with transformers' SDPA on the CPU

docs/null_driver.md says what the numbers mean.
"""

import argparse
import importlib.util
import sys

import torch

from tools.null_driver import build, table
from tools.null_driver.counting import host_microseconds
from tools.null_driver.driver import DEVICES, start
from tools.null_driver.steps import PARTS, make_step


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.null_driver", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=DEVICES, default="sm_90", help="default: %(default)s, which the record is of"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose name holds this text")
    parser.add_argument("--kernels", action="store_true", help="launches by kernel, small launches by operator")
    parser.add_argument("--record", action="store_true", help="write the numbers down")
    parser.add_argument("--host", action="store_true", help="time the host instead")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="of --host; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.record and (arguments.only or arguments.device != "sm_90"):
        parser.error("--record writes all steps, of sm_90")
    reason = build.missing()
    if reason is not None:
        parser.error(reason)
    return arguments


def _print_counts(found: table.Table, kernels: bool) -> None:
    print(f"{'':<58}{'launches':>9}{'maps':>6}{'products':>9}{'small':>6}{'calls':>7}")
    for step, part, *numbers in table.rows(found):
        print(f"{step + ', ' + part:<58}" + "".join(f"{n:>{w}}" for n, w in zip(numbers, (9, 6, 9, 6, 7), strict=True)))
        if kernels:
            for kind in ("launches", "small"):
                for name, n in found[step][part][kind].items():
                    print(f"    {n:>4} {name}")


def _print_host(only: str, rounds: int) -> None:
    kinds = ["bert_fast"]
    if importlib.util.find_spec("transformers") is not None:
        kinds += ["fused", "transformers"]
    cases = [("BertModel", precision, layers) for precision in ("bf16", "autocast") for layers in (1, 12)]
    cases.append(("BertForSequenceClassification", "autocast", 2))
    print(f"{'':<52}{'forward':>18}{'backward':>18}{'optimize':>18}   us of the host, least and median")
    for name, precision, layers in cases:
        label = f"{name} {precision}, layers: {layers}"
        if only not in label:
            continue
        steps = {kind: make_step(name, precision, kind=kind, num_layers=layers) for kind in kinds}
        for kind, parts in host_microseconds(steps, rounds).items():
            times = "".join(f"{parts[part][0]:>9.0f}{parts[part][1]:>9.0f}" for part in PARTS)
            print(f"{label:<40}{kind:<12}{times}", flush=True)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # results that nobody wrote hold any bits, and slow the CPU's products
    driver = start(arguments.device)
    if arguments.host:
        _print_host(arguments.only, arguments.rounds)
        return 0
    found = table.measure(driver, arguments.only)
    _print_counts(found, arguments.kernels)
    if driver.refusals[0]:
        print(f"refused: {driver.refusals[0]}, the last one: {driver.refusals[1]}")
    if arguments.record:
        table.write(found)
    if arguments.device != "sm_90":
        return 0
    wrong = table.risen(found, table.read())
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
