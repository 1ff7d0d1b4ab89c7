"""The matrix products that the ahead-of-time gate compiles: every tile that ships, with what it ships for.

Half precision: every candidate tile (`_gemm_tiles.py`) with every epilogue in bf16, in the layout that BERT has it in;
the first tile in fp16 and with the other activations; a product split along K, with the second stage of every epilogue;
and operands that no copy engine can move. fp32: the one tile that is there.

Names have the tile's role, not its sizes, which differ from processor to processor.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.case import AotCase, dtype_name

_KERNEL = "_gemm_kernel"
_ROLES = ("wide", "twin", "third", "small")
_TOKENS, _HIDDEN, _INTERMEDIATE = 256, 768, 3072  # tokens for more than one step along K where they are summed over
_UNALIGNED = (32, 32, 32)
_OTHER_ACTIVATIONS = ("gelu_new", "relu", "silu", "tanh")


def _products(dtype: torch.dtype, act: str) -> dict[str, Callable[..., object]]:
    """Name -> a product of BERT's layers as a function of the tile (keyword)."""
    from bert_fast.triton import _gemm

    x = torch.empty(_TOKENS, _HIDDEN, dtype=dtype)
    up = torch.empty(_INTERMEDIATE, _HIDDEN, dtype=dtype)
    down = torch.empty(_HIDDEN, _INTERMEDIATE, dtype=dtype)
    wide = torch.empty(_TOKENS, _INTERMEDIATE, dtype=dtype)
    bias = torch.empty(_INTERMEDIATE)
    sums = torch.empty(_INTERMEDIATE, _HIDDEN)

    def kept(**tile: object) -> object:
        return _gemm.product_activation(x, up.t(), bias, act, True, **tile)

    def dropped(**tile: object) -> object:
        return _gemm.product_activation(x, up.t(), bias, act, False, **tile)

    return {
        f"{act}": kept,
        f"{act} unsaved": dropped,
        f"{act} derivative": lambda **tile: _gemm.product_derivative(x, down, wide, act, True, torch.float32, **tile),
        f"{act} recomputed": lambda **tile: _gemm.product_recomputed(x, up.t(), bias, wide, act, torch.float32, **tile),
        "accumulate": lambda **tile: _gemm.product(wide.t(), x, out=sums, accumulate=True, **tile),
        "plain nt": lambda **tile: _gemm.product(x, up.t(), bias, **tile),
        "plain nn": lambda **tile: _gemm.product(wide, up, **tile),
        "plain tn": lambda **tile: _gemm.product(wide.t(), x, out_dtype=torch.float32, **tile),
    }


def _unaligned(dtype: torch.dtype) -> object:
    """Rows of an odd number of elements: only a caller that forces a tile has our kernel multiply them."""
    from bert_fast.triton import _gemm
    from bert_fast.triton._gemm_tiles import Tile

    x, weight = torch.zeros(_TOKENS, 101, dtype=dtype), torch.zeros(203, 101, dtype=dtype)
    return _gemm.product_activation(x, weight.t(), torch.zeros(203), "gelu", True, tile=Tile(*_UNALIGNED))


def gemm_aot_cases() -> Iterator[AotCase]:
    """Cases for the processor that `assume_architecture` names."""
    half, single = torch.bfloat16, torch.float32
    for number, role in enumerate(_ROLES):
        for what in _products(half, "gelu"):
            yield _case(what, role, number, half, "gelu")
    for what in ("gelu", "gelu derivative", "gelu recomputed", "accumulate"):
        yield _case(what, "wide", 0, torch.float16, "gelu")
        yield _case(what, "exact", 0, single, "gelu")
    yield _case("plain nt", "exact", 0, single, "gelu")
    for act in _OTHER_ACTIVATIONS:
        for what in (act, f"{act} derivative"):
            yield _case(what, "twin", 1, half, act)
    for what in ("gelu", "gelu derivative", "gelu recomputed", "accumulate", "plain nt"):
        yield _case(what, "split", 3, half, "gelu", split_k=4)
    for dtype in (half, single):
        launch = functools.partial(_unaligned, dtype)
        yield AotCase(f"gelu unaligned {dtype_name(dtype)}", None, launch, {}, {}, product_tiles={_KERNEL: _UNALIGNED})


def _case(what: str, role: str, number: int, dtype: torch.dtype, act: str, *, split_k: int = 1) -> AotCase:
    from bert_fast.triton._gemm_tiles import candidates
    from bert_fast.triton._launch import architecture

    name = architecture(Tensor().device)
    tile = replace(candidates(name, dtype)[number], split_k=split_k)
    is_moved = name in ("sm_90", "sm_100")
    reads_more = what.endswith(("accumulate", "derivative", "recomputed"))
    is_specialized = tile.warp_specialize and is_moved and not reads_more
    only = frozenset({_KERNEL})

    def launch() -> object:
        return _products(dtype, act)[what](tile=tile)

    return AotCase(
        f"{what} {role} {dtype_name(dtype)}",
        None,
        launch,
        {_KERNEL: tile.block_m * tile.block_n},
        {_KERNEL: 1 if what == "accumulate" and split_k == 1 else tile.resident},
        # Two groups of warps of a specialized program share the tile: a thread of theirs makes half of what it would.
        multiply_adds={_KERNEL: tile.block_k // 2 if is_specialized else tile.block_k},
        warpgroup_products=only if dtype != torch.float32 else frozenset(),
        product_tiles={_KERNEL: (tile.block_m, tile.block_n, tile.block_k)},
        bulk_copies=only if is_moved else frozenset(),
        specialized=only if is_specialized else frozenset(),
    )
