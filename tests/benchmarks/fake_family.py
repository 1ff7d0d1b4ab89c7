"""A family for tests of the benchmarks: right and wrong cases, small enough for a CPU."""

import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem, Use

FAMILY = "tests.benchmarks.fake_family"


def cases() -> Iterator[KernelCase]:
    yield _case("right", Use.GPU | Use.SMALL | Use.CPU)
    for variant in ("wrong", "crashing", "unrepeatable", "unseeded", "peers", "step"):
        yield _case(variant, Use.GPU | Use.SMALL)


def _case(variant: str, uses: Use) -> KernelCase:
    return KernelCase(FAMILY, "8x16", torch.float32, variant, partial(make, variant), uses)


def eager(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def make(variant: str, device: torch.device) -> Problem:
    if variant == "step":
        return step(device)
    x, weight = torch.randn(8, 16, device=device).requires_grad_(), torch.randn(16, device=device).requires_grad_()
    if variant == "unseeded":
        x = torch.full((8, 16), random.SystemRandom().random()).requires_grad_()

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        if variant == "crashing":
            raise RuntimeError("the device is gone")
        noise = random.SystemRandom().random() if variant == "unrepeatable" else 0.0  # as a race would have it
        return x * weight + noise

    def verify() -> None:
        assert variant != "wrong", "worst error 1.0, allowed 0.1"
        fast(x, weight)

    def broken(x: Tensor, weight: Tensor) -> Tensor:
        raise ImportError("half an installation")

    return Problem(
        (x, weight), torch.randn(8, 16, device=device), fast, eager, {"fwd": 1088, "bwd": 1664}, verify,
        peers={"liger": eager, "apex": broken} if variant == "peers" else {}, flops={"fwd": 128},
    )  # fmt: skip


def step(device: torch.device) -> Problem:
    parameter, gradient = torch.randn(16, device=device), torch.randn(16, device=device)
    moment = torch.zeros(16, device=device)

    def fast(parameter: Tensor, gradient: Tensor) -> None:
        moment.mul_(0.9).add_(gradient)
        parameter.sub_(moment, alpha=0.1)

    return Problem((parameter, gradient), None, fast, fast, {"step": 320}, lambda: None)
