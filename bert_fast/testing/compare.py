"""The one comparison of parity tests: an implementation's error against plain torch's, both against fp64."""

import torch
from torch import Tensor

from bert_fast.testing.tolerances import tolerance

__all__ = ["assert_close_to_truth"]


def assert_close_to_truth(op: str, output: str, actual: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Asserts error(actual) <= factor * error(plain) + floor, on the worst element and in RMS.

    actual, plain (Tensor, one dtype): the implementation under test and plain torch, from the same rounded inputs.
    truth (Tensor, fp64): the reference in fp64 from the same rounded inputs.
    Compared where `actual` is: at full shapes on a GPU, copies to the host would take longer than all the rest.
    """
    assert actual.shape == truth.shape, f"{op}.{output}: shape {list(actual.shape)}, expected {list(truth.shape)}"
    assert actual.dtype == plain.dtype, f"{op}.{output}: dtype {actual.dtype}, expected {plain.dtype}"
    if truth.numel() == 0:
        return
    bound = tolerance(op, output, actual.dtype)
    exact = truth.detach().to(actual.device, torch.float64)
    mine, theirs = (t.detach().to(exact) - exact for t in (actual, plain))
    assert torch.isfinite(mine).all(), f"{op}.{output}: {int((~torch.isfinite(mine)).sum())} values are not finite"
    for name, norm in (("worst", lambda e: e.abs().max()), ("rms", lambda e: e.pow(2).mean().sqrt())):
        got, allowed = norm(mine).item(), bound.factor * norm(theirs).item() + bound.floor
        assert got <= allowed, f"{op}.{output}: {name} error {got:.3e}, allowed {allowed:.3e} ({actual.dtype})"
