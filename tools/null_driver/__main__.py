"""Counts what steps of BERT launch, and times what they cost the host, over a CUDA driver that runs nothing.

    python -m tools.null_driver            launches, small launches, Python calls; what is above tests/launches.json
    python -m tools.null_driver --record   writes them down
    python -m tools.null_driver --host     microseconds of the host, in turn with transformers' SDPA on the CPU

docs/null_driver.md says what the numbers mean.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence

import torch

from tools.null_driver import build, table
from tools.null_driver.counting import host_microseconds
from tools.null_driver.driver import DEVICES, start
from tools.null_driver.steps import PARTS, make_step

Times = Mapping[str, Sequence[float]]  # of the parts, least and median


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
    print(f"{'us of the host, least and median':<66}" + "".join(f"{part:>18}" for part in PARTS))
    for precision in ("bf16", "autocast"):
        few, many = (_time("BertModel", precision, layers, kinds, only, rounds) for layers in (1, 12))
        for kind in few:
            differences = {part: zip(few[kind][part], many[kind][part], strict=True) for part in PARTS[:2]}
            layer = {part: [(more - less) / 11 for less, more in pairs] for part, pairs in differences.items()}
            _print_times(f"a layer of these, {precision}", kind, layer)
    _time("BertForSequenceClassification", "autocast", 12, kinds, only, rounds)


def _time(name: str, precision: str, layers: int, kinds: list[str], only: str, rounds: int) -> dict[str, Times]:
    label = f"{name}, {precision}, layers: {layers}"
    if only not in label:
        return {}
    times = host_microseconds(
        {kind: make_step(name, precision, kind=kind, num_layers=layers) for kind in kinds}, rounds
    )  # fmt: skip
    for kind, parts in times.items():
        _print_times(label, kind, parts)
    for kind in kinds[:-1] if len(kinds) > 1 else ():
        _print_ratios(label, kind, times[kind], times[kinds[-1]])
    return times


def _print_ratios(label: str, kind: str, ours: Times, theirs: Times) -> None:
    """Of the least times to transformers'."""
    of = {"forward": PARTS[:1], "both passes": PARTS[:2], "whole step": PARTS}
    least = {name: [sum(times[part][0] for part in parts) for times in (ours, theirs)] for name, parts in of.items()}
    told = ", ".join(f"{name} {own / other:.2f}" for name, (own, other) in least.items())
    print(f"  {kind} to transformers, {label}: {told}", flush=True)


def _print_times(label: str, kind: str, parts: Times) -> None:
    times = "".join(f"{least:>9.0f}{median:>9.0f}" for least, median in parts.values())
    print(f"{label + ', ' + kind:<66}{times}", flush=True)


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
