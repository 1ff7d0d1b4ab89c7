"""Products for the tests of the matrix-product kernels: operands, our results and those of plain torch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.testing.compare import assert_close_to_truth

KINDS = ("plain", "accumulate", "activation", "derivative", "recomputed")
LAYOUTS = ("nn", "nt", "tn", "tt")


@dataclass
class Operands:
    """a [m, k], b [k, n], bias [n], x [m, n] (pre or dy), out fp32 [m, n]."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    x: Tensor
    out: Tensor

    def map(self, function: Any) -> "Operands":
        tensors = (self.a, self.b, self.bias, self.x, self.out)
        return Operands(*(None if t is None else function(t) for t in tensors))


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str = "nt", *, device: str = "cpu",
    has_bias: bool = True, bias_dtype: torch.dtype | None = None,
) -> Operands:  # fmt: skip
    """Random ones whose product has values near 1; layout: BLAS letters of a and b."""

    def matrix(rows: int, cols: int, letter: str, scale: float) -> Tensor:
        t = (torch.randn(rows, cols, device=device) * scale).to(dtype)
        return t.t().contiguous().t() if letter == "t" else t

    return Operands(
        matrix(m, k, layout[0], 1.0),
        matrix(k, n, layout[1], max(k, 1) ** -0.5),
        torch.randn(n, device=device).to(bias_dtype or dtype) if has_bias else None,
        torch.randn(m, n, device=device).to(dtype),
        torch.randn(m, n, device=device),
    )


def ours(gemm: Any, given: Operands, kind: str, act: str = "gelu", tile: Any = None) -> dict[str, Tensor]:
    """Results by name, of bert_fast/triton/_gemm.py."""
    a, b, bias, x = given.a, given.b, given.bias, given.x
    if kind == "plain":
        return {"c": gemm.product(a, b, bias, tile=tile)}
    if kind == "accumulate":
        return {"out": gemm.product(a, b, out=given.out.clone(), accumulate=True, tile=tile)}
    if kind == "activation":
        y, pre = gemm.product_activation(a, b, bias, act, True, tile=tile)
        return {"y": y, "pre": pre}
    if kind == "derivative":
        dpre, activation, dbias = gemm.product_derivative(a, b, x, act, True, torch.float32, tile=tile)
        return {"dpre": dpre, "act": activation, "dbias": dbias}
    dpre, dbias = gemm.product_recomputed(a, b, bias, x, act, torch.float32, tile=tile)
    return {"dpre": dpre, "dbias": dbias}


def plain(given: Operands, kind: str, act: str = "gelu") -> dict[str, Tensor]:
    """The same by plain torch in the dtype of a; in fp64 the truth."""
    of = ACTIVATIONS[act]
    wide = torch.float64 if given.a.dtype == torch.float64 else torch.float32
    z = given.a @ given.b
    if kind == "accumulate":
        return {"out": given.out + (given.a.to(wide) @ given.b.to(wide))}
    if given.bias is not None and kind != "derivative":
        z = z + given.bias.to(z.dtype)
    if kind == "plain":
        return {"c": z}
    if kind == "activation":
        return {"y": of.forward(z), "pre": z}
    dpre = z * of.derivative(given.x) if kind == "derivative" else given.x * of.derivative(z)
    results = {"dpre": dpre, "dbias": dpre.to(wide).sum(0)}
    return results | {"act": of.forward(given.x)} if kind == "derivative" else results


def check(gemm: Any, given: Operands, kind: str, act: str = "gelu", tile: Any = None) -> dict[str, Tensor]:
    """Compares every result with the fp64 truth; operands must stay as they were. Returns the results."""
    before = given.map(torch.clone)
    actual = ours(gemm, given, kind, act, tile)
    truth, same_dtype = plain(given.map(lambda t: t.double()), kind, act), plain(given, kind, act)
    for name, result in actual.items():
        assert_close_to_truth("gemm", name, result, same_dtype[name], truth[name])
        assert result.is_contiguous(), name
    pairs = zip(vars(given).values(), vars(before).values(), strict=True)
    assert all(t is None or torch.equal(t, copy) for t, copy in pairs)
    return actual
