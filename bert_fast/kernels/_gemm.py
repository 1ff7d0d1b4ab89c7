"""THE matrix products of the Triton back-end, with what follows them: by our kernel, or by the library.

    product             c = a b + bias                       or  out += a b
    product_activation  y = act(a b + bias), pre = a b + bias
    product_derivative  dpre = (a b) * act'(pre), act(pre), column sums of dpre
    product_recomputed  dpre = dy * act'(a b + bias), column sums of dpre

a [M, K], b [K, N] (fp32, fp16 or bf16, one dtype): any strides; a transposed view of a contiguous matrix is as good as
a contiguous one, a copy is made only where neither dimension has its neighbours side by side. Every size may be 0.
bias [N]: fp32 or a's dtype. hidden_act: the names of BERT's config, as in bias_gelu.

`_gemm_tiles.choose` says who computes, and with which tile; `tile=` forces our kernel. In the interpreter it is always
ours, and so it is within `batch_invariant`, where the number of rows has no say. Results are new, contiguous tensors of
a's dtype where nothing else is said.

Bytes moved beside operands (M K + K N), elements of e bytes; "library": a product, then the kernels of bias_gelu:
    product_activation  ours: y, pre: 2 M N e                     library: 3 M N e  (pre; pre, y; without pre the same)
    product_derivative  ours: pre, dpre, act: 3 M N e             library: 6 M N e  (dact; pre, dact, dpre; pre, act)
    product_recomputed  ours: dy, dpre: 2 M N e                   library: 4 M N e
    accumulate          out twice, ours and the library's: 8 M N in fp32, 2 M N e

Precision: accumulators, biases, activations, column sums in fp32, rounded once; the library rounds the product (with
bias) to a's dtype before the activation. fp32 products use TF32 where PyTorch is told to allow it. Deterministic.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bert_fast.batch_invariance import ASKED
from bert_fast.devices import wide_products
from bert_fast.env import SETTINGS
from bert_fast.kernels._column_sums import column_sums
from bert_fast.kernels._gemm_launch import Epilogue, launch
from bert_fast.kernels._gemm_tiles import INTERPRETER_TILE, Tile, choose, choose_for_weights
from bert_fast.kernels._launch import assumed_architecture, unit_stride
from bert_fast.kernels.bias_gelu import _ACTIVATIONS, bias_gelu_bwd, bias_gelu_fwd
from bert_fast.reference.bias_gelu import BiasGelu

__all__ = [
    "by_library",
    "narrowed",
    "product",
    "product_activation",
    "product_derivative",
    "product_recomputed",
    "settings",
]

_library_only: ContextVar[bool] = ContextVar("library_only", default=False)


@contextmanager
def by_library() -> Iterator[None]:
    """Within the context the library makes every product that does not force a tile: for comparisons and tuning."""
    token = _library_only.set(True)
    try:
        yield
    finally:
        _library_only.reset(token)


def settings() -> tuple[Any, ...]:
    """What kernels and tiles are chosen by beside the arguments of a call."""
    return _library_only.get(), ASKED.get(), assumed_architecture(), torch.backends.cuda.matmul.allow_tf32


def narrowed(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter in the dtype of what it is multiplied with."""
    return parameter if parameter.dtype is x.dtype else parameter.to(x.dtype)


def _tile(kind: str, a: Tensor, b: Tensor, forced: Tile | None, out: Tensor | None = None) -> Tile | None:
    """The tile for our kernel, None for the library."""
    if forced is not None:
        return forced
    if _library_only.get():
        return None
    if SETTINGS.triton_interpret:
        return INTERPRETER_TILE
    if ASKED.get():
        return choose_for_weights(kind, a, b)
    return choose(kind, a, b, a.dtype if out is None else out.dtype)


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b; where there is nothing to add up (K = 0), a product of zeros of the same shape."""
    if a.shape[1]:
        return a, b
    return a.new_zeros((a.shape[0], 1)), b.new_zeros((1, b.shape[1]))


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """a @ b + bias [M, N].

    out: where to write it, rows anywhere, neighbouring columns side by side; else a new tensor of `out_dtype` (a's, or
    fp32), which is rounded once, from the accumulator. accumulate: added to `out`, before it is rounded; no bias then.
    """
    if out is None:
        assert not accumulate, "accumulate needs out"
        is_as_a = tile is None and (out_dtype is None or out_dtype == a.dtype)
        if is_as_a and (a.shape[1] == 0 or _tile("plain", a, b, None) is None):  # whatever the sizes
            return torch.mm(a, b) if bias is None else torch.addmm(narrowed(bias, a), a, b)
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)
    shape = (a.shape[0], b.shape[1])
    assert out.shape == shape and out.dtype in (a.dtype, torch.float32) and (out.stride(1) == 1 or shape[1] <= 1)
    assert not accumulate or bias is None
    if out.numel() == 0 or (accumulate and a.shape[1] == 0):
        return out
    a, b = _operands(a, b)
    tile = _tile("accumulate" if accumulate else "plain", a, b, tile, out)
    if tile is None:
        return _library_product(a, b, bias, out, accumulate)
    if accumulate:
        launch(a, b, tile, Epilogue("accumulate", out, x=out))
    else:
        launch(a, b, tile, Epilogue("plain", out, bias=_contiguous(bias)))
    return out


def _library_product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> Tensor:
    if out.dtype == a.dtype:
        if accumulate:
            return out.addmm_(a, b)
        if bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(narrowed(bias, a), a, b, out=out)
    # Nowhere else does the library round from its accumulators to fp32.
    way = wide_products[a.device, a.dtype] if a.is_cuda and torch.version.hip is None else "widened"
    if accumulate:
        if way == "addmm":
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        if way == "widened":
            return out.addmm_(a.float(), b.float())
        return out.add_(torch.mm(a, b, out_dtype=torch.float32, out=torch.empty_like(out)))
    if way == "widened":
        torch.mm(a.float(), b.float(), out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    return out if bias is None else out.add_(bias)


def product_activation(
    a: Tensor, b: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """(act(a @ b + bias) [M, N], a @ b + bias before the activation, or None unless `save_pre`)."""
    shape = (a.shape[0], b.shape[1])
    a, b = _operands(a, b)
    tile = _tile("activation", a, b, tile) if shape[0] * shape[1] else INTERPRETER_TILE
    if tile is None:
        pre = product(a, b, bias)
        return bias_gelu_fwd(BiasGelu(pre, None, hidden_act)), pre if save_pre else None
    y = a.new_empty(shape)
    pre = torch.empty_like(y) if save_pre else None
    if y.numel():
        epilogue = Epilogue("activation", y, z=pre, bias=_contiguous(bias), activation=_ACTIVATIONS[hidden_act])
        launch(a, b, tile, epilogue)
    return y, pre


def product_derivative(
    a: Tensor,
    b: Tensor,
    pre: Tensor,
    hidden_act: str,
    wants_activation: bool,
    sums_dtype: torch.dtype | None,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre = (a @ b) * act'(pre), act(pre) or None, column sums of dpre [N] or None); pre [M, N] of a's dtype.

    sums_dtype: of the column sums; None: not wanted.
    """
    if pre.numel() == 0:
        return _empty(pre, wants_activation, sums_dtype)
    a, b = _operands(a, b)
    tile = _tile("derivative", a, b, tile)
    if tile is None:
        dpre, dbias = _library_derivative(product(a, b), pre, hidden_act, sums_dtype)
        return dpre, bias_gelu_fwd(BiasGelu(pre, None, hidden_act)) if wants_activation else None, dbias
    pre = unit_stride(pre)
    dpre = a.new_empty(pre.shape)
    act = torch.empty_like(dpre) if wants_activation else None
    epilogue = Epilogue(
        "derivative", dpre, x=pre, z=act, activation=_ACTIVATIONS[hidden_act], wants_sums=sums_dtype is not None
    )
    return dpre, act, _sums(launch(a, b, tile, epilogue), sums_dtype)


def product_recomputed(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    hidden_act: str,
    sums_dtype: torch.dtype | None,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dpre = dy * act'(a @ b + bias), column sums of dpre [N] or None, as above); dy [M, N] of a's dtype."""
    if dy.numel() == 0:
        dpre, _, dbias = _empty(dy, False, sums_dtype)
        return dpre, dbias
    a, b = _operands(a, b)
    tile = _tile("recomputed", a, b, tile)
    if tile is None:
        return _library_derivative(dy, product(a, b, bias), hidden_act, sums_dtype)
    dy = unit_stride(dy)
    dpre = a.new_empty(dy.shape)
    activation = _ACTIVATIONS[hidden_act]
    epilogue = Epilogue(
        "recomputed", dpre, x=dy, bias=_contiguous(bias), activation=activation, wants_sums=sums_dtype is not None
    )
    return dpre, _sums(launch(a, b, tile, epilogue), sums_dtype)


def _library_derivative(
    dy: Tensor, pre: Tensor, hidden_act: str, sums_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    # The kernel sums columns for the sake of a bias: one of zeros asks for the sums alone.
    bias = pre.new_zeros(pre.shape[1], dtype=sums_dtype) if sums_dtype else None
    made = bias_gelu_bwd(BiasGelu(pre, bias, hidden_act), dy)
    return made["x"], made.get("bias")


def _empty(
    like: Tensor, wants_activation: bool, sums_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Results where there is no element: sums over no rows are 0."""
    dpre = like.new_empty(like.shape)
    dbias = like.new_zeros(like.shape[1], dtype=sums_dtype) if sums_dtype else None
    return dpre, torch.empty_like(dpre) if wants_activation else None, dbias


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _sums(partial: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if partial is None or dtype is None else column_sums(partial, dtype)[0]
