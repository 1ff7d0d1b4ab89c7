"""Launches the matrix-product kernels: operands as they lie in memory, tensor descriptors, split products."""

import contextvars
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bert_fast.env import SETTINGS
from bert_fast.kernels._gemm_kernel import _gemm_kernel, _gemm_reduce_kernel
from bert_fast.kernels._gemm_table import Tile
from bert_fast.kernels._launch import architecture, ceil_div, num_multiprocessors

__all__ = ["Epilogue", "has_aligned_rows", "launch", "layout_of", "row_major"]

# Tiles of the second stage of a split product: 4 warps, 16 elements a thread, whole 128-byte lines.
_REDUCE_M, _REDUCE_N = 16, 128
_REDUCE_REGISTERS = 128  # of a thread: ptxas would spill one to get along with 40
_ALIGNMENT = 16  # bytes, of tensor descriptors' bases and strides; as much as one load can be wide


@dataclass(frozen=True)
class Epilogue:
    """What follows the product, in the words of `_gemm_epilogue.py`: y, z and x are [M, N] with rows of neighbours.

    partial: fp32 [row blocks, N] for column sums, made by `launch` where wants_sums is set.
    """

    kind: str
    y: Tensor
    x: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    activation: str = ""
    wants_sums: bool = False


def row_major(t: Tensor) -> tuple[Tensor, bool]:
    """(the matrix or its transpose with neighbours in rows, whether it is the transpose); a copy where neither has."""
    if t.stride(1) == 1:
        return t, False
    if t.stride(0) == 1:
        return t.t(), True
    return t.contiguous(), False


def layout_of(a: Tensor, b: Tensor) -> str:
    """BLAS letters of a product: n for an operand as its shape says, t for one that lies transposed."""
    return "".join("t" if row_major(operand)[1] else "n" for operand in (a, b))


def has_aligned_rows(t: Tensor) -> bool:
    """Whether a tensor descriptor can name this row-major matrix: rows of their own that start at whole 16 bytes."""
    rows, cols = t.shape
    starts = t.data_ptr() | t.stride(0) * t.element_size()
    return rows > 0 and 0 < cols <= t.stride(0) and t.stride(1) == 1 and starts % _ALIGNMENT == 0


def _has_copy_engine(device: torch.device) -> bool:
    """Processors for which descriptors were compiled and looked at; consumer chips have the engine, but less memory."""
    return architecture(device) in ("sm_90", "sm_100")


def _descriptor(t: Tensor | None, rows: int, cols: int) -> TensorDescriptor | None:
    """A descriptor of a matrix that moves tiles [rows, cols]; made on the host, so no workspace is needed."""
    return None if t is None else TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, cols])


def _precision(dtype: torch.dtype, device: torch.device) -> str:
    """How fp32 is multiplied: in TF32 where the user allows it to PyTorch, else as three terms of it where there is."""
    if dtype != torch.float32 or SETTINGS.triton_interpret:  # the interpreter multiplies in fp32
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if architecture(device).startswith("sm_") else "ieee"


def _with_workspace(device: torch.device, run: Callable[[], object]) -> None:
    """Runs a launch whose kernel makes descriptors; Triton asks the context for memory to keep them in."""
    context = contextvars.copy_context()
    context.run(triton.set_allocator, lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    context.run(run)


def launch(a: Tensor, b: Tensor, tile: Tile, epilogue: Epilogue) -> Tensor | None:
    """Runs our kernel on a [M, K] and b [K, N], M, N, K >= 1; returns the partial column sums [P, 1, N], if wanted."""
    (num_rows, num_inner), num_cols = a.shape, b.shape[1]
    (a, a_transposed), (b, b_transposed) = row_major(a), row_major(b)
    num_m, num_n = ceil_div(num_rows, tile.block_m), ceil_div(num_cols, tile.block_n)
    steps = ceil_div(num_inner, tile.block_k)
    splits = ceil_div(steps, ceil_div(steps, tile.split_k))  # none of them without a step
    is_split = splits > 1
    device = a.device
    first = epilogue
    if is_split:
        split_rows = num_m * tile.block_m
        product = torch.empty((splits * split_rows, num_cols), dtype=torch.float32, device=device)
        first = Epilogue("plain", product)
    results = [t for t in (first.x, first.y, first.z) if t is not None]
    by_copies = _has_copy_engine(device) and has_aligned_rows(a) and has_aligned_rows(b)
    results_by_copies = by_copies and all(map(has_aligned_rows, results))
    # Two groups of warps share a specialized tile, half its rows each; the compiler can't add up columns across them.
    can_specialize = architecture(device) == "sm_90" and results_by_copies and not is_split and not epilogue.wants_sums
    is_specialized = tile.warp_specialize and can_specialize
    if tile.warp_specialize and not is_specialized:
        tile = replace(tile, num_warps=8, parts=4)
    host_descriptors = by_copies and not is_specialized
    partial = None
    if epilogue.wants_sums:
        row_blocks = ceil_div(num_rows, _REDUCE_M) if is_split else num_m
        partial = torch.empty((row_blocks, 1, num_cols), dtype=torch.float32, device=device)

    def operand(t: Tensor, is_transposed: bool, rows: int, cols: int) -> object:
        return _descriptor(t, *((cols, rows) if is_transposed else (rows, cols))) if host_descriptors else t

    def result(t: Tensor | None) -> object:
        return _descriptor(t, tile.block_m, tile.block_n // tile.parts) if results_by_copies and host_descriptors else t

    # Masks change at whole vectors along whichever size is contiguous in memory; a copy engine needs no masks.
    vector = _ALIGNMENT // a.element_size()
    m_unit = math.gcd(num_rows, vector) if a_transposed and not by_copies else 1
    k_is_contiguous = (not a_transposed or b_transposed) and not by_copies
    k_unit = math.gcd(num_inner, vector) if k_is_contiguous else 1
    # Where K is the number of tokens, every batch is another one: one kernel, with masks, serves them all.
    even_k = k_is_contiguous and num_inner % tile.block_k == 0
    n_unit = math.gcd(num_cols, vector)
    # fp32 tiles of out, read and written, leave a multiprocessor's shared memory room for one program.
    resident = 1 if first.kind == "accumulate" else tile.resident
    num_programs = min(num_m * num_n * splits, num_multiprocessors(device) * resident)
    with torch.cuda.device_of(a):
        run = functools.partial(
            _gemm_kernel[(num_programs,)],
            operand(a, a_transposed, tile.block_m, tile.block_k),
            operand(b, b_transposed, tile.block_k, tile.block_n),
            first.bias,
            result(first.x),
            result(first.y),
            result(first.z),
            None if is_split else partial,
            a.stride(0),
            b.stride(0),
            _row_stride(first.x),
            _row_stride(first.y),
            _row_stride(first.z),
            num_rows // m_unit,
            num_cols // n_unit,
            num_inner // k_unit,
            splits,
            KIND=first.kind,
            ACTIVATION=first.activation,
            A_TRANSPOSED=a_transposed,
            B_TRANSPOSED=b_transposed,
            TMA=by_copies,
            TMA_RESULTS=results_by_copies,
            IS_SPLIT=is_split,
            EVEN_K=even_k,
            M_UNIT=m_unit,
            N_UNIT=n_unit,
            K_UNIT=k_unit,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=tile.group_m,
            PARTS=tile.parts,
            WARP_SPECIALIZE=is_specialized,
            PRECISION=_precision(a.dtype, device),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # Horner's rule in activations
            **_register_limit(0 if is_specialized else tile.max_registers, device),
        )
        if is_specialized:
            _with_workspace(device, run)
        else:
            run()
        if is_split:
            _gemm_reduce_kernel[(ceil_div(num_rows, _REDUCE_M), ceil_div(num_cols, _REDUCE_N))](
                product,
                epilogue.bias,
                epilogue.x,
                epilogue.y,
                epilogue.z,
                partial,
                _row_stride(epilogue.x),
                _row_stride(epilogue.y),
                _row_stride(epilogue.z),
                num_rows,
                num_cols // n_unit,
                splits,
                split_rows,
                KIND=epilogue.kind,
                ACTIVATION=epilogue.activation,
                N_UNIT=n_unit,
                BLOCK_M=_REDUCE_M,
                BLOCK_N=_REDUCE_N,
                num_warps=4,
                enable_fp_fusion=True,
                **_register_limit(_REDUCE_REGISTERS, device),
            )
    return partial


def _row_stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _register_limit(registers: int, device: torch.device) -> dict[str, int]:
    """The option of a launch that says so; AMD's compiler knows none."""
    return {"maxnreg": registers} if registers and architecture(device).startswith("sm_") else {}
