"""A family for tests of the smoke run: cases that are right, wrong, or take their process with them."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close

FAMILY = "tests.benchmarks.smoke_family"


def cases() -> Iterator[KernelCase]:
    for variant in ("right", "wrong", "not finite", "raising", "dying", "drifting", "last"):
        yield KernelCase(FAMILY, "8x16", torch.float32, variant, partial(make, variant), Use.SMALL)


class _Spoilt(torch.autograd.Function):
    """x * weight, of which elements are replaced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x * weight
        y[3, 5] += value
        y[7, :2] += value
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum(0), None


def make(variant: str, device: torch.device) -> Problem:
    x, weight = torch.randn(8, 16, device=device).requires_grad_(), torch.randn(16, device=device).requires_grad_()
    upstream, num_runs = torch.randn(8, 16, device=device), 0

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        if variant == "raising":
            raise RuntimeError("the kernel does not compile")
        if variant == "dying":
            print(f"blocking {os.environ.get('CUDA_LAUNCH_BLOCKING')}", file=sys.stderr, flush=True)
            os.abort()
        if variant == "drifting" and num_runs > 9:
            return x * weight * 2
        if variant in ("wrong", "not finite"):
            return _Spoilt.apply(x, weight, 0.5 if variant == "wrong" else float("nan"))
        return x * weight

    def verify() -> None:
        assert_gradients_close("layer_norm", ("y", "dx", "dweight"), fast, plain, (x, weight), upstream)

    return Problem((x, weight), upstream, fast, plain, {"fwd": 1088, "bwd": 1664}, verify)
