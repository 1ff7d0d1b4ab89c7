"""Cases of linear: attention's output projection and the narrowing half of the MLP, where dropout and LayerNorm follow.

The other products of a layer are in the families `qkv_projection`, `linear_gelu` and `mlp`. Ahead of time: the one
kernel that makes all of them, every tile that ships with what it ships for.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import (
    KernelCase,
    Problem,
    Use,
    assert_gradients_close,
    dtype_name,
    full_shapes,
    installed,
    verified_only,
)
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths, H to H and I to H; a few rows; sums made in parts."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size.hidden, size.hidden, torch.bfloat16, "attention output")
        yield _case(uses, num_tokens, size.intermediate, size.hidden, torch.bfloat16, "down")
    h, wide = bert.BASE.hidden, bert.BASE.intermediate
    yield _case(Use.CPU, bert.FEWEST_TOKENS, h, h, torch.float32, "attention output")
    yield _case(Use.CPU, bert.FEWEST_TOKENS, wide, h, torch.float32, "down")
    yield _case(Use.SMALL, bert.FEW_ROWS, 41, 67, torch.float32, "odd")  # widths that are no multiple of anything
    yield _case(Use.SMALL, bert.FEW_ROWS, 40, 72, torch.float16, "odd")
    yield _case(Use.SMALL, bert.FEW_ROWS, 384, 384, torch.bfloat16, "attention output")
    split = (((128, 96, 200), 3), ((70, 40, 264), 2))
    for (shape, parts), dtype in itertools.product(split, (torch.bfloat16, torch.float32)):
        name, make_it = "x".join(map(str, shape)), partial(_split_sum, shape, parts, dtype)
        yield KernelCase("linear", name, dtype, f"split {parts}", make_it, Use.WITNESS)


def _case(uses: Use, num_tokens: int, k: int, n: int, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase("linear", f"{num_tokens}x{k}x{n}", dtype, variant, partial(make, num_tokens, k, n, dtype), uses)


def make(num_tokens: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """[T, K] to [T, N] with a bias."""
    x = bert.normal(num_tokens, k, dtype=dtype, device=device).requires_grad_()
    weight, bias = bert.weight(n, k, dtype, device), bert.bias(n, dtype, device)
    upstream = bert.normal(num_tokens, n, dtype=dtype, device=device)
    inputs = (x, weight, bias)
    op, names = bert.tolerances_of("linear", device), ("y", "dx", "dweight", "dbias")
    product = 2 * num_tokens * k * n
    return Problem(
        inputs, upstream, ops.linear, F.linear,
        verify=partial(assert_gradients_close, op, names, ops.linear, F.linear, inputs, upstream),
        peers=_peers() if device.type == "cuda" else {},
        bytes_moved=bert.product_bytes(inputs, upstream), flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip


def _peers() -> dict[str, Callable[..., Tensor]]:
    """Dense layers of flash-attn and apex, with bias and its gradient in cuBLASLt's epilogue."""
    return installed(
        flash_attn=("flash_attn.ops.fused_dense:fused_dense_func", lambda f, *inputs: f(*inputs)),
        apex=("apex.fused_dense.fused_dense:FusedDenseFunc", lambda f, *inputs: f.apply(*inputs)),
    )


def _split_sum(shape: tuple[int, int, int], parts: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """A product [M, K] x [K, N] whose sum over K is made in parts, which a second kernel adds; shape: (M, N, K)."""

    def verify() -> None:
        from bert_fast.triton import _gemm
        from bert_fast.triton._gemm_tiles import Tile

        m, n, k = shape
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        made = _gemm.product(a, b, tile=Tile(64, 32, 32, split_k=parts))
        assert_close_to_truth("linear", "y", made, a @ b, a.double() @ b.double())

    return verified_only(verify)


_KERNEL = "_gemm_kernel"
_ROLES = ("wide", "twin", "third", "small")  # of candidate tiles; their sizes differ from processor to processor
_UNALIGNED = (32, 32, 32)


def aot_cases() -> Iterator[AotCase]:
    """Every tile that ships, for the processor that `assume_architecture` names.

    Half precision: every candidate (`_gemm_tiles.py`) with every epilogue in bf16, in the layout that BERT has it in;
    the first tile in fp16 and with the other activations; a product split along K, with the second stage of every
    epilogue; and operands that no copy engine can move. fp32: the one tile that is there.
    """
    single, fp16, half = bert.DTYPES
    epilogues = ("gelu", "gelu derivative", "gelu recomputed", "accumulate")
    for role in _ROLES:
        for what in _products(half, "gelu"):
            yield _aot_case(what, role, half)
    for what in epilogues:
        yield _aot_case(what, "wide", fp16)
        yield _aot_case(what, "exact", single)
    yield _aot_case("plain nt", "exact", single)
    for act in ("gelu_new", "relu", "silu", "tanh"):
        for what in (act, f"{act} derivative"):
            yield _aot_case(what, "twin", half, act)
    for what in (*epilogues, "plain nt"):
        yield _aot_case(what, "split", half)
    for dtype in (half, single):
        facts = {_KERNEL: KernelFacts(product_tile=_UNALIGNED)}
        yield AotCase(f"gelu unaligned {dtype_name(dtype)}", partial(_unaligned, dtype), facts)


def _aot_case(what: str, role: str, dtype: torch.dtype, act: str = "gelu") -> AotCase:
    """what: of `_products`. role: of `_ROLES`, "exact" for the tile of fp32, or "split" for the smallest tile."""
    from bert_fast.triton._gemm_tiles import candidates
    from bert_fast.triton._launch import architecture

    name = architecture(Tensor().device)
    number = {"exact": 0, "split": 3}[role] if role not in _ROLES else _ROLES.index(role)
    split_k = 4 if role == "split" else 1
    tile = replace(candidates(name, dtype)[number], split_k=split_k)
    is_moved = name in ("sm_90", "sm_100")
    reads_more = what.endswith(("accumulate", "derivative", "recomputed"))
    is_specialized = tile.warp_specialize and is_moved and not reads_more
    facts = KernelFacts(
        tile.block_m * tile.block_n,
        resident_programs=1 if what == "accumulate" and split_k == 1 else tile.resident,
        # Two groups of warps of a specialized program share the tile: a thread of theirs makes half of what it would.
        multiply_adds=tile.block_k // 2 if is_specialized else tile.block_k,
        needs_warpgroup_products=dtype != torch.float32,
        product_tile=(tile.block_m, tile.block_n, tile.block_k),
        needs_bulk_copies=is_moved,
        is_specialized=is_specialized,
    )

    def launch() -> object:
        return _products(dtype, act)[what](tile=tile)

    return AotCase(f"{what} {role} {dtype_name(dtype)}", launch, {_KERNEL: facts})


def _products(dtype: torch.dtype, act: str) -> dict[str, Callable[..., object]]:
    """Name -> a product of BERT's layers as a function of the tile (keyword)."""
    from bert_fast.triton import _gemm

    num_tokens, hidden, intermediate = 256, bert.BASE.hidden, bert.BASE.intermediate  # several steps along K
    x, wide = torch.empty(num_tokens, hidden, dtype=dtype), torch.empty(num_tokens, intermediate, dtype=dtype)
    up, down = torch.empty(intermediate, hidden, dtype=dtype), torch.empty(hidden, intermediate, dtype=dtype)
    bias, sums = torch.empty(intermediate), torch.empty(intermediate, hidden)
    return {
        f"{act}": partial(_gemm.product_activation, x, up.t(), bias, act, True),
        f"{act} unsaved": partial(_gemm.product_activation, x, up.t(), bias, act, False),
        f"{act} derivative": partial(_gemm.product_derivative, x, down, wide, act, True, torch.float32),
        f"{act} recomputed": partial(_gemm.product_recomputed, x, up.t(), bias, wide, act, torch.float32),
        "accumulate": partial(_gemm.product, wide.t(), x, out=sums, accumulate=True),
        "plain nt": partial(_gemm.product, x, up.t(), bias),
        "plain nn": partial(_gemm.product, wide, up),
        "plain tn": partial(_gemm.product, wide.t(), x, out_dtype=torch.float32),
    }


def _unaligned(dtype: torch.dtype) -> object:
    """Rows of an odd number of elements: only a caller that forces a tile has our kernel multiply them."""
    from bert_fast.triton import _gemm
    from bert_fast.triton._gemm_tiles import Tile

    x, weight = torch.zeros(256, 101, dtype=dtype), torch.zeros(203, 101, dtype=dtype)
    return _gemm.product_activation(x, weight.t(), torch.zeros(203), "gelu", True, tile=Tile(*_UNALIGNED))
