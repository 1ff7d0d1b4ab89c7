"""What the tests of linear layers' kernels share: inputs, layouts, the comparison with the fp64 reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from bert_fast.testing.compare import assert_close_to_truth

Tensors = dict[str, Tensor | None]
Run = Callable[[object, Tensors], dict[str, Tensor]]

LAYOUTS = ["row-strided", "column-strided", "padded", "transposed", "expanded"]


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def relaid(t: Tensor, layout: str) -> Tensor:
    """A matrix of the same values laid out otherwise; "expanded" repeats its first row."""
    if layout == "row-strided":
        return torch.cat([t, t + 1], dim=1)[:, : t.shape[1]]
    if layout == "column-strided":  # neither dimension has its neighbours side by side
        return t.repeat_interleave(2, dim=1)[:, ::2]
    if layout == "padded":  # rows start at whole vectors, but are no whole number of them
        return torch.nn.functional.pad(t, (0, -t.shape[1] % 8), value=float("nan"))[:, : t.shape[1]]
    if layout == "transposed":
        return t.t().contiguous().t()
    return t[:1].expand_as(t)


def check(op: str, run: Run, kernels: object, plain: object, reference: object, inputs: Tensors) -> dict[str, Tensor]:
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were."""
    before = {name: None if t is None else t.clone() for name, t in inputs.items()}
    truth = run(reference, {name: None if t is None else t.double() for name, t in inputs.items()})
    stock, actual = run(plain, inputs), run(kernels, inputs)
    assert actual.keys() == truth.keys()
    for name in actual:
        assert_close_to_truth(op, name, actual[name], stock[name], truth[name])
        assert actual[name].is_contiguous(), name
    assert all(t is None or torch.equal(t, before[name]) for name, t in inputs.items())
    return actual


def representable(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value survives a rounding to dtype."""
    return torch.equal(t, t.to(dtype).to(t.dtype))
