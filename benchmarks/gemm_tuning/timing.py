"""Times products, each by the library and by our kernel with every candidate tile, those first found right."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gemm_tuning.products import DTYPES, PRODUCTS, Operands, Product, compute, operands, truth
from benchmarks.kernels.timing import WARMUP, Contestant, launched_kernels, make_clock
from benchmarks.kit.clock import Launch
from benchmarks.kit.crashes import is_usable
from benchmarks.kit.results import reason
from bert_fast.testing.compare import assert_close_to_truth

if TYPE_CHECKING:
    from bert_fast.triton._gemm_tiles import Tile

ROUNDS, SCREENING_ROUNDS, SCREENING_FACTOR = 10, 3, 1.25
ROTATION_BYTES, MAX_ROTATION = 256 * 2**20, 8  # several times the largest L2 cache (60 MB on an H200)
MAX_SPLITS = 16


def tiles_for(product: Product, device: torch.device, is_specialized: bool = False) -> list["Tile"]:
    """Candidates for a device, and the same with the sum over K in parts where tiles are fewer than processors.

    is_specialized: those with warps of their own for loads, or all the others.
    """
    from bert_fast.triton._gemm_tiles import candidates
    from bert_fast.triton._launch import architecture, ceil_div, num_multiprocessors

    if device.type != "cuda":
        return []
    found: list[Tile] = []
    for tile in candidates(architecture(device), DTYPES[product.dtype]):
        if tile.warp_specialize != is_specialized:
            continue
        found.append(tile)
        count = ceil_div(product.m, tile.block_m) * ceil_div(product.n, tile.block_n)
        processors = num_multiprocessors(device)
        splits = 2 * max(1, tile.split_k)
        while count < processors and count * splits <= 2 * processors and splits <= MAX_SPLITS:
            if product.k < 4 * splits * tile.block_k:  # a part must be long enough to fill the pipeline
                break
            found.append(replace(tile, split_k=splits))
            splits *= 2
    return list(dict.fromkeys(found))


def time_product(
    product: Product, device: torch.device, rounds: int = ROUNDS, is_specialized: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields a result for the library and for every tile: times and what they come to, or `error`.

    A contestant whose results are wrong, or that does not run, is not timed. Where the library fails there is nothing
    to compare with: its failure is raised.
    """
    from bert_fast.triton._gemm_tiles import source_hash

    facts = {
        "what": product.what, "product": product.kind, "layout": product.layout, "dtype": product.dtype,
        "m": product.m, "n": product.n, "k": product.k, "source": source_hash(),
    }  # fmt: skip
    given = [operands(product, device)]
    count = 1 if device.type == "cpu" else min(MAX_ROTATION, -(-ROTATION_BYTES // given[0].nbytes))
    exact = truth(product, given[0])
    plain = _once(product, given[0], None)
    kernels: dict[str, dict[str, str]] = {}
    tiles: dict[str, Tile | None] = {"library": None}
    for tile in tiles_for(product, device, is_specialized):
        name = describe(tile)
        try:
            with launched_kernels() as launched:
                results = _once(product, given[0], tile)
            for output, expected in exact.items():
                of_half = "_of_half" if results[output].dtype != given[0].a.dtype else ""
                assert_close_to_truth("gemm", output + of_half, results[output], plain[output], expected)
        except Exception as failure:  # too much shared memory, or wrong: whatever stops it is what there is to say
            yield facts | {"candidate": name, "tile": tile.to_json(), "error": reason(failure, 300)}
            if not is_usable(device):
                raise  # else all that come after it would have its error
            continue
        tiles[name], kernels[name] = tile, launched
    del exact, plain
    given += [operands(product, device) for _ in range(count - 1)]
    contestants = [
        Contestant(name, "fwd", _launches(product, given, tile), make_clock(device)) for name, tile in tiles.items()
    ]
    _take_turns(contestants, rounds)
    library = contestants[0].times
    for contestant in contestants:
        times, tile = contestant.times, tiles[contestant.provider]
        same_rounds = replace(library, seconds=library.seconds[: len(times.seconds)])
        yield facts | {
            "candidate": contestant.provider,
            "tile": None if tile is None else tile.to_json(),
            **times.microseconds(),
            "tflop_s": round(product.flops / times.median / 1e12, 1),
            "speedup_over_library": round(times.speedup_over(same_rounds), 3),
            "rounds": len(times.seconds),
            **({} if tile is None else {"verified": True, "kernels": kernels[contestant.provider]}),
        }


def _once(product: Product, given: Operands, tile: "Tile | None") -> dict[str, Tensor]:
    """Results that leave the operands as they are, and stay when others are computed from those."""
    before = None if given.out is None else given.out.clone()
    results = {name: t.clone() if t is given.out else t for name, t in compute(product, given, tile).items()}
    if given.out is not None and before is not None:
        given.out.copy_(before)
    return results


def _launches(product: Product, given: Sequence[Operands], tile: "Tile | None") -> list[Launch]:
    def launch_of(one: Operands) -> Launch:
        return lambda: compute(product, one, tile)

    return [launch_of(one) for one in given]


def _take_turns(contestants: Sequence[Contestant], rounds: int) -> None:
    """A few rounds of all; then only the library and those of ours that are near the best go on."""
    running = list(contestants)
    for round_index in range(WARMUP + rounds):
        for contestant in running:
            contestant.take_turn(round_index >= WARMUP)
        if round_index == WARMUP + SCREENING_ROUNDS - 1 and len(contestants) > 1:
            limit = SCREENING_FACTOR * min(c.times.median for c in contestants[1:])
            running = [contestants[0], *(c for c in contestants[1:] if c.times.median <= limit)]


def describe(tile: "Tile") -> str:
    """Blocks, warps and stages ("128x256x64 8 warps 3 stages"), and what else is unusual about a tile."""
    text = f"{tile.block_m}x{tile.block_n}x{tile.block_k} {tile.num_warps} warps {tile.num_stages} stages"
    blocks = {"block_m", "block_n", "block_k", "num_warps", "num_stages"}
    usual = type(tile)(tile.block_m, tile.block_n, tile.block_k)
    others = [
        f"{name} {value}"
        for name, value in tile.to_json().items()
        if name not in blocks and value != getattr(usual, name)
    ]
    return ", ".join([text, *others])


def preparations(device: torch.device) -> list[tuple[Product, "Tile"]]:
    """Products and tiles that compile differently: every kind and layout of the fewest tokens, with each tile once.

    Without specialized tiles: what is prepared runs, and one that hangs would hold up all others.
    """
    found: dict[object, tuple[Product, Tile]] = {}
    for product in sorted(PRODUCTS, key=lambda p: p.flops):
        units = tuple(size % 8 for size in (product.m, product.n, product.k))
        for tile in tiles_for(product, device):
            found.setdefault((product.kind, product.layout, product.has_bias, units, tile), (product, tile))
    return list(found.values())


def prepare(product: Product, tile: "Tile", device: torch.device) -> None:
    """Compiles what a contestant launches, into the compiler's cache on disk, by running it."""
    compute(product, operands(product, device), tile)
