"""The families of matrix products: operations and bytes are what they say, contestants compute the same function."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.timing import gradients_of, time_case
from benchmarks.kit.saved_bytes import saved_bytes
from benchmarks.registry import kernel_cases

CPU = torch.device("cpu")
FAMILIES = ("linear", "linear_gelu", "mlp", "gated_mlp", "qkv_projection", "linear_cross_entropy")
SMALL = [
    pytest.param(case, id=case.name) for case in kernel_cases("small", FAMILIES) if case.dtype == torch.float32
]  # fmt: skip


def counted(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", SMALL)
def test_operations_are_those_of_the_eager_function(case: KernelCase) -> None:
    problem = case.make(CPU)
    inputs, upstream = problem.arguments_of("eager")
    outputs: list[Any] = []
    forward = counted(lambda: outputs.append(problem.eager(*inputs)))
    backward = counted(lambda: gradients_of(outputs[0], inputs, upstream))
    if set(problem.flops) == {"fwd_bwd"}:
        assert problem.flops["fwd_bwd"] == forward + backward
    else:
        assert problem.flops == {"fwd": forward, "bwd": backward}


@pytest.mark.parametrize("case", [case for case in SMALL if "cross_entropy" not in case.id])
def test_bytes_are_operands_results_and_what_is_kept_between(case: KernelCase) -> None:
    problem = case.make(CPU)
    inputs, output = problem.inputs, problem.fast(*problem.inputs)
    kept = saved_bytes(nn.Identity(), lambda: problem.fast(*inputs), inputs)
    assert ("recompute" in case.variant or case.family in {"linear", "qkv_projection"}) == (kept == 0)
    operands = sum(t.nbytes for t in inputs)
    assert problem.bytes_moved["fwd"] == operands + output.nbytes + kept
    read_again = sum(t.nbytes for t in inputs if t.dim() == 2)
    assert problem.bytes_moved["bwd"] == output.nbytes + read_again + kept + operands


@pytest.mark.parametrize("case", SMALL)
def test_every_contestant_computes_the_same(case: KernelCase) -> None:
    problem = case.make(CPU)
    expected = problem.eager(*problem.inputs)
    if isinstance(expected, tuple):
        expected = torch.cat(expected, dim=1)
    for name, function in (("bert_fast", problem.fast), *problem.peers.items()):
        inputs, upstream = problem.arguments_of(name)
        output = function(*inputs)
        torch.testing.assert_close(output, expected)
        (dweight,) = torch.autograd.grad(output, [inputs[1]], upstream)
        wanted = gradients_of(problem.eager(*problem.inputs), problem.inputs, problem.arguments_of("eager")[1])[1]
        torch.testing.assert_close(dweight[: len(wanted)], wanted)


def test_full_positions_are_the_whole_batch() -> None:
    (case,) = [c for c in kernel_cases("small", ["linear_cross_entropy"]) if c.name.endswith("fp32/labelled")]
    problem = case.make(CPU)
    rows = len(problem.inputs[0])
    (x, *_, labels), _ = problem.arguments_of("hf_full_positions")
    assert (rows, len(x), len(labels), int((labels != -100).sum())) == (12, 80, 80, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_contestants_are_timed_in_every_mode(family: str) -> None:
    """Compiled and with several outputs, too; in one launch where gradients are made in forward."""
    case = kernel_cases("small", [family])[0]
    providers = ("bert_fast", "eager", "compiled")
    results = list(time_case(case, CPU, providers, with_peers=True, rounds=2, compile_backend="aot_eager"))
    modes = {"fwd_bwd"} if family == "linear_cross_entropy" else {"fwd", "bwd"}
    peers = {"linear_cross_entropy": ["hf_full_positions"], "qkv_projection": ["one_linear"]}.get(family, [])
    assert {(r["provider"], r["mode"]) for r in results} == {(p, m) for p in (*providers, *peers) for m in modes}
    assert all("bert_fast_speedup" in r for r in results if r["provider"] != "bert_fast")


def test_goals_have_their_cases() -> None:
    for family in FAMILIES:
        cases = kernel_cases("gpu", [family])
        shapes = {tuple(map(int, case.shape.split("x"))) for case in cases}
        assert {shape[0] for shape in shapes} >= {4096, 16384, 32768}
        assert {768, 1024} <= {size for shape in shapes for size in shape}
        assert {case.dtype for case in cases} == {torch.bfloat16}
        assert {case.dtype for case in kernel_cases("cpu", [family])} == {torch.float32}
