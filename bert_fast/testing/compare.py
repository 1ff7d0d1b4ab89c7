"""The comparisons of parity tests: an implementation's error against plain torch's, both against fp64; equal bits.

A comparison that fails raises, unless the caller collects all of them:

    with comparisons() as found:
        verify()
    [one.wrong for one in found]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from bert_fast.testing.tolerances import tolerance


@dataclass(frozen=True)
class Comparison:
    """One output beside the truth.

    worst, rms: errors, of finite values; allowed_worst, allowed_rms: by the table of tolerances. bad_share: of the
    elements, those that are not finite or off by more than allowed_worst; first_bad: the index of the first of them.
    wrong: what is wrong with the output, None where nothing is.
    """

    output: str
    dtype: str
    worst: float
    rms: float
    allowed_worst: float
    allowed_rms: float
    bad_share: float
    first_bad: tuple[int, ...] | None
    not_finite: int
    wrong: str | None


_found: ContextVar[list[Comparison] | None] = ContextVar("comparisons", default=None)


@contextmanager
def comparisons() -> Iterator[list[Comparison]]:
    """Within the context comparisons are put into the list that it gives, and wrong ones do not raise."""
    found: list[Comparison] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def assert_close_to_truth(
    op: str, output: str, actual: Tensor, plain: Tensor, truth: Tensor, *, name: str | None = None
) -> None:
    """Asserts error(actual) <= factor * error(plain) + floor, on the worst element and in RMS.

    actual, plain (Tensor, one dtype): the implementation under test and plain torch, from the same rounded inputs.
    truth (Tensor, fp64): the reference in fp64 from the same rounded inputs.
    name: what the output is called, where the table of tolerances has one entry for several.
    Compared where `actual` is: at full shapes on a GPU, copies to the host would take longer than all the rest.
    """
    assert actual.shape == truth.shape, f"{op}.{output}: shape {list(actual.shape)}, expected {list(truth.shape)}"
    assert actual.dtype == plain.dtype, f"{op}.{output}: dtype {actual.dtype}, expected {plain.dtype}"
    if truth.numel() == 0:
        return
    bound = tolerance(op, output, actual.dtype)
    exact = truth.detach().to(actual.device, torch.float64)
    mine, theirs = (t.detach().to(exact) - exact for t in (actual, plain))
    allowed = [bound.factor * norm + bound.floor for norm in _norms(theirs)]
    _judge(f"{op}.{name or output}", name or output, actual.dtype, mine, (allowed[0], allowed[1]))


def assert_same_values(op: str, output: str, actual: Tensor, expected: Tensor) -> None:
    """Asserts that two tensors, of any devices, hold the same values."""
    assert actual.shape == expected.shape, f"{op}.{output}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{op}.{output}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel():
        difference = actual.detach().double() - expected.detach().to(actual.device, torch.float64)
        _judge(f"{op}.{output}", output, actual.dtype, difference, (0.0, 0.0))


def _norms(error: Tensor) -> tuple[float, float]:
    return error.abs().max().item(), error.pow(2).mean().sqrt().item()


def _judge(full_name: str, output: str, dtype: torch.dtype, error: Tensor, allowed: tuple[float, float]) -> None:
    """Raises, or takes down, what an error amounts to."""
    is_finite = torch.isfinite(error)
    not_finite = error.numel() - int(is_finite.sum())
    errors = _norms(error.masked_fill(~is_finite, 0.0) if not_finite else error)
    wrong = f"{full_name}: {not_finite} values are not finite" if not_finite else None
    for norm, got, most in zip(("worst", "rms"), errors, allowed, strict=True):
        if wrong is None and not got <= most:  # what is allowed may be NaN
            wrong = f"{full_name}: {norm} error {got:.3e}, allowed {most:.3e} ({dtype})"
    found = _found.get()
    if found is None:
        assert wrong is None, wrong
        return
    bad = (~is_finite | (error.abs() > allowed[0])).flatten()
    num_bad = int(bad.sum())
    first = _index(int(bad.int().argmax()), error.shape) if num_bad else None
    short = str(dtype).removeprefix("torch.")
    found.append(Comparison(output, short, *errors, *allowed, num_bad / error.numel(), first, not_finite, wrong))


def _index(place: int, shape: torch.Size) -> tuple[int, ...]:
    """Of an element, given its place among all."""
    index = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))
