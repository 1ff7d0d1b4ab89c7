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

import contextvars
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bert_fast.batch_invariance import ASKED
from bert_fast.devices import wide_products
from bert_fast.env import SETTINGS
from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.triton._column_sums import column_sums
from bert_fast.triton._gemm_kernel import _gemm_kernel, _gemm_reduce_kernel
from bert_fast.triton._gemm_tiles import (
    ALIGNMENT,
    INTERPRETER_TILE,
    Tile,
    choose,
    choose_for_weights,
    has_aligned_rows,
    row_major,
)
from bert_fast.triton._launch import (
    architecture,
    assumed_architecture,
    ceil_div,
    kind_of,
    num_multiprocessors,
    register_limit,
    unit_stride,
)
from bert_fast.triton._launch_plan import LaunchPlan, Window, launch_plan, recorders
from bert_fast.triton._sizes import smaller
from bert_fast.triton.bias_gelu import _ACTIVATIONS, bias_gelu_bwd, bias_gelu_fwd

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


# Tiles of the second stage of a split product: 4 warps, 16 elements a thread, whole 128-byte lines.
_REDUCE_M, _REDUCE_N = 16, 128
_REDUCE_REGISTERS = 128  # of a thread: ptxas would spill one to get along with 40
# Kinds for which descriptors were compiled and looked at; consumers' sm_120 has the engine, but less memory.
_WITH_COPY_ENGINE = ("sm_90", "sm_100")


class Epilogue(NamedTuple):
    """What follows the product, in the words of `_gemm_kernel.py`: y, z and x are [M, N] with rows of neighbours.

    partial: fp32 [row blocks, N] for column sums, made by `launch` where wants_sums is set.
    """

    kind: str
    y: Tensor
    x: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    activation: str = ""
    wants_sums: bool = False


def _precision(dtype: torch.dtype, architecture: str) -> str:
    """How fp32 is multiplied: in TF32 where the user allows it to PyTorch, else as three terms of it where there is."""
    if dtype != torch.float32 or SETTINGS.triton_interpret:  # the interpreter multiplies in fp32
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if architecture.startswith("sm_") else "ieee"


def _with_workspace(device: torch.device, run: Callable[[], object]) -> None:
    """Runs a launch whose kernel makes descriptors; Triton asks the context for memory to keep them in."""
    recorder = recorders.get(threading.get_ident())
    if recorder is not None:
        recorder.spoil()  # a program has no such context
    context = contextvars.copy_context()
    context.run(triton.set_allocator, lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    context.run(run)


class _Form(NamedTuple):
    """What a product's kernels depend on: how operands lie, which sizes are multiples, what follows; not sizes."""

    dtype: torch.dtype
    a_transposed: bool
    b_transposed: bool
    by_copies: bool  # of operands
    results_by_copies: bool
    kind: str
    activation: str
    wants_sums: bool
    tile: Tile
    is_split: bool
    # Masks change at whole vectors along whichever size is contiguous in memory; a copy engine needs no masks.
    m_unit: int
    n_unit: int
    k_unit: int
    even_k: bool
    architecture: str
    precision: str


class _Prepared(NamedTuple):
    """A product's plans. resident: programs of a multiprocessor; tile: as launched."""

    plan: LaunchPlan
    tile: Tile
    resident: int
    needs_workspace: bool
    reduce: LaunchPlan | None


@functools.lru_cache(maxsize=4096)
def _prepare(p: _Form) -> _Prepared:
    tile = p.tile
    # Two groups of warps share a specialized tile, half its rows each; the compiler can't add up columns across them.
    # Nor read another matrix behind the product: of ten products on an H200 one, that accumulates, came out with NaN.
    can_specialize = p.architecture == "sm_90" and p.results_by_copies and not p.is_split and not p.wants_sums
    can_specialize = can_specialize and p.kind in ("plain", "activation")
    is_specialized = tile.warp_specialize and can_specialize
    if tile.warp_specialize and not is_specialized:
        tile = replace(tile, num_warps=8, parts=4)
    first, activation = ("plain", "") if p.is_split else (p.kind, p.activation)
    # fp32 tiles of out, read and written, leave a multiprocessor's shared memory room for one program.
    resident = 1 if first == "accumulate" else tile.resident
    windows: tuple[Window, ...] = ()
    if p.by_copies and not is_specialized:
        result = (tile.block_m, tile.block_n // tile.parts) if p.results_by_copies else None
        of_a, of_b = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n)
        windows = (
            of_a[::-1] if p.a_transposed else of_a, of_b[::-1] if p.b_transposed else of_b,
            None, result, result, result,
        )  # fmt: skip
    plan = launch_plan(
        _gemm_kernel,
        windows,
        KIND=first,
        ACTIVATION=activation,
        A_TRANSPOSED=p.a_transposed,
        B_TRANSPOSED=p.b_transposed,
        TMA=p.by_copies,
        TMA_RESULTS=p.results_by_copies,
        IS_SPLIT=p.is_split,
        EVEN_K=p.even_k,
        M_UNIT=p.m_unit,
        N_UNIT=p.n_unit,
        K_UNIT=p.k_unit,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        PARTS=tile.parts,
        WARP_SPECIALIZE=is_specialized,
        PRECISION=p.precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # Horner's rule in activations
        **register_limit(0 if is_specialized else tile.max_registers, p.architecture),
    )
    reduce = None
    if p.is_split:
        reduce = launch_plan(
            _gemm_reduce_kernel,
            KIND=p.kind,
            ACTIVATION=p.activation,
            N_UNIT=p.n_unit,
            BLOCK_M=_REDUCE_M,
            BLOCK_N=_REDUCE_N,
            num_warps=4,
            enable_fp_fusion=True,
            **register_limit(_REDUCE_REGISTERS, p.architecture),
        )
    return _Prepared(plan, tile, resident, is_specialized, reduce)


def launch(a: Tensor, b: Tensor, tile: Tile, epilogue: Epilogue) -> Tensor | None:
    """Runs our kernel on a [M, K] and b [K, N], M, N, K >= 1; returns the partial column sums [P, 1, N], if wanted."""
    (num_rows, num_inner), num_cols = a.shape, b.shape[1]
    (a, a_transposed), (b, b_transposed) = row_major(a), row_major(b)
    device, name = a.device, architecture(a.device)
    x, y, z, bias = epilogue.x, epilogue.y, epilogue.z, epilogue.bias
    by_copies = kind_of(name) in _WITH_COPY_ENGINE and has_aligned_rows(a) and has_aligned_rows(b)
    splits = _num_splits(num_inner, tile)
    is_split = splits > 1
    # Of a split product the kernel writes partial ones, whose rows are as aligned as their number is.
    results = [] if is_split else [t for t in (x, y, z) if t is not None]
    rows_are_aligned = num_cols * 4 % ALIGNMENT == 0 if is_split else all(map(has_aligned_rows, results))
    vector = ALIGNMENT // a.dtype.itemsize
    m_unit = math.gcd(num_rows, vector) if a_transposed and not by_copies else 1
    # Where K is the number of tokens, every batch is another one: one kernel, with masks, serves them all.
    k_is_contiguous = (not a_transposed or b_transposed) and not by_copies
    k_unit, n_unit = math.gcd(num_inner, vector) if k_is_contiguous else 1, math.gcd(num_cols, vector)
    ready = _prepare(
        _Form(
            a.dtype, a_transposed, b_transposed, by_copies, by_copies and rows_are_aligned, epilogue.kind,
            epilogue.activation, epilogue.wants_sums, tile, is_split, m_unit, n_unit, k_unit,
            k_is_contiguous and num_inner % tile.block_k == 0, name, _precision(a.dtype, name),
        )
    )  # fmt: skip
    num_m, num_n = ceil_div(num_rows, ready.tile.block_m), ceil_div(num_cols, ready.tile.block_n)
    num_programs = smaller(num_m * num_n * splits, num_multiprocessors(device) * ready.resident)
    numbers = (num_rows // m_unit, num_cols // n_unit, num_inner // k_unit, splits)
    partial = None
    if epilogue.wants_sums:
        row_blocks = ceil_div(num_rows, _REDUCE_M if is_split else ready.tile.block_m)
        partial = a.new_empty((row_blocks, 1, num_cols), dtype=torch.float32)

    def run(bias: Tensor | None, x: Tensor | None, y: Tensor, z: Tensor | None, partial: Tensor | None) -> None:
        strides = a.stride(0), b.stride(0), _row_stride(x), y.stride(0), _row_stride(z)
        ready.plan((num_programs,), (a, b, bias, x, y, z, partial), (*strides, *numbers))

    if ready.reduce is not None:
        split_rows = num_m * ready.tile.block_m
        product = a.new_empty((splits * split_rows, num_cols), dtype=torch.float32)
        run(None, None, product, None, None)
        ready.reduce(
            (ceil_div(num_rows, _REDUCE_M), ceil_div(num_cols, _REDUCE_N)),
            (product, bias, x, y, z, partial),
            (_row_stride(x), y.stride(0), _row_stride(z), num_rows, num_cols // n_unit, splits, split_rows),
        )
    elif ready.needs_workspace:
        _with_workspace(device, lambda: run(bias, x, y, z, partial))
    else:
        run(bias, x, y, z, partial)
    return partial


def _num_splits(num_inner: int, tile: Tile) -> int:
    """Parts of K, none of them without a step."""
    if tile.split_k == 1:
        return 1
    steps = ceil_div(num_inner, tile.block_k)
    return ceil_div(steps, ceil_div(steps, tile.split_k))


def _row_stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)
