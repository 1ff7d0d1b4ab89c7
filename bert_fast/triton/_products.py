"""Matrix products of programs by cuBLASLt, called by address in place of PyTorch's functions.

Off unless `BERT_FAST_PRODUCTS=cublaslt` (docs/decisions/0018-prepared-launches.md). The host then spends less on a
product: there are no views, no results and no dispatcher, and the library is asked for an algorithm once for each
form of a product, not at each call.

Products are those of PyTorch's functions: same operands, accumulators in fp32, TF32 for fp32 where
`torch.backends.cuda.matmul.allow_tf32` is set. Partial sums of a product that is split are added in fp32 and in a
fixed order. The library may choose another algorithm than PyTorch's call gets, with other last bits, and a program's
first run is PyTorch's.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bert_fast import native
from bert_fast.env import SETTINGS
from bert_fast.triton import _gemm
from bert_fast.triton._program import Call, Empty, Program, What, steps_of
from bert_fast.triton._sizes import Expression

# PyTorch for the CPU has no such function.
_are_tuned: Callable[[], bool] = getattr(torch._C, "_cuda_tunableop_is_enabled", lambda: False)
_WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for sm_90 (cuBLAS documentation, cublasSetWorkspace)


def are_by_address() -> bool:
    """Whether programs call cuBLASLt.

    They do not while PyTorch accumulates products in fp16 (`torch.backends.cuda.matmul.allow_fp16_accumulation`) or
    tunes them (`torch.cuda.tunable`).
    """
    if SETTINGS.products not in (None, "cublaslt"):
        raise ValueError(f"BERT_FAST_PRODUCTS: expected cublaslt or nothing, got {SETTINGS.products!r}")
    return (
        SETTINGS.products is not None
        and _is_there()
        and not torch.backends.cuda.matmul.allow_fp16_accumulation
        and not _are_tuned()
    )


def settings() -> tuple[Any, ...]:
    """What a program with products depends on beside the arguments of a call.

    Within inference mode, memory that a program keeps is of tensors that nothing else may write to.
    """
    return (
        *_gemm.settings(), SETTINGS.products is not None and are_by_address(), torch.is_inference_mode_enabled(),
    )  # fmt: skip


@functools.cache
def _is_there() -> bool:
    extension, major = native.load(), int((torch.version.cuda or "13").split(".")[0])
    is_there = extension is not None and extension.has_cublaslt(major)
    if not is_there:
        warnings.warn(
            f"BERT_FAST_PRODUCTS=cublaslt: there is no C++ extension, or no libcublasLt.so.{major} (12 or 13) in this "
            f"process; PyTorch's functions make the products", RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    return is_there


def with_products(program: Program) -> Program:
    """The program with products in place of calls that make them, as far as it says what they multiply."""
    workspace = program.num_slots, len(program.expressions)
    order: list[What] = [Empty(workspace[0], (workspace[1],), torch.uint8)]
    for what, _ in program.steps:
        if type(what) is not Call or what.product is None:
            order.append(what)
            continue
        product = what.product
        if what.slots:
            order.append(Empty(product.out.slot, (product.rows, product.cols), product.out.dtype))
        order.append(product._replace(workspace=workspace))
    return program._replace(
        num_slots=program.num_slots + 1,
        expressions=(*program.expressions, Expression("constant", _WORKSPACE_BYTES)),
        steps=steps_of(order, program.num_inputs, program.outputs),
    )
