"""Our matrix products beside the library's, tile by tile: what the stored table of a GPU is made from.

    python -m benchmarks.gemm_tuning [--seconds N] [--only TEXT] [--specialized]
                                                                     times on this GPU, the most telling products first
    python -m benchmarks.gemm_tuning --write-table                   tables from all stored results; needs no GPU
    python -m benchmarks.gemm_tuning --list

Part `gemm` of `make gpu` does the first within its budget. For every product of BERT's layers and of its vocabulary,
forward and backward, the library with separate kernels and our kernel with every candidate tile (`_gemm_tiles.py` of
bert_fast/kernels) take turns; a contestant is timed only after its results were found right. Those far behind after a
few rounds drop out.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import matrix_products as bert
from benchmarks.budget import Seconds
from benchmarks.clock import Launch
from benchmarks.kernels import WARMUP, Contestant, launched_kernels, make_clock
from benchmarks.record import RESULTS, Recorder, gpu_environment, slug
from bert_fast.testing.compare import assert_close_to_truth

if TYPE_CHECKING:
    from bert_fast.kernels._gemm_table import Tile

__all__ = ["PRODUCTS", "Product", "preparations", "prepare", "time_products"]

TOKENS = (16384, 4096, 32768, 8192, 65536, 2048, 1024)  # the most telling first
CHUNKS = (2048, 1024, 512)  # labelled rows whose logits linear_cross_entropy makes at once
ROUNDS, SCREENING_ROUNDS, SCREENING_FACTOR = 10, 3, 1.25
ROTATION_BYTES, MAX_ROTATION = 256 * 2**20, 8  # several times the largest L2 cache (60 MB on an H200)
MAX_SPLITS = 16
ROW_UNIT = 64  # elements
HIDDEN_ACT = "gelu"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Product:
    """One matrix product [m, k] x [k, n] with what follows it, as `bert_fast/kernels/_gemm_table.py` tells them apart.

    what: where BERT has it ("base up"). kind: plain, accumulate, activation, derivative or recomputed. layout: BLAS
    letters of both operands; forward is nt, the gradient of an input nn, of a weight tn. is_wide: fp32 result.
    """

    what: str
    kind: str
    layout: str
    m: int
    n: int
    k: int
    has_bias: bool = False
    dtype: str = "bf16"
    is_wide: bool = False

    @property
    def name(self) -> str:
        """Stable name used in results."""
        return f"{self.what} {self.kind} {self.layout} {self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def flops(self) -> int:
        """Of the product alone."""
        return 2 * self.m * self.n * self.k


def layer_products(size: bert.Size, tokens: int, dtype: str = "bf16") -> Iterator[Product]:
    """All products of a layer, those with something to fuse first."""
    h, i = size.hidden, size.intermediate

    def named(what: str, kind: str, layout: str, m: int, n: int, k: int) -> Product:
        has_bias = kind in {"activation", "recomputed"} or (kind, layout) == ("plain", "nt")
        return Product(f"{size.name} {what}", kind, layout, m, n, k, has_bias, dtype)

    yield named("up", "activation", "nt", tokens, i, h)
    yield named("down", "derivative", "nn", tokens, i, h)  # dy Wd, times act'(pre)
    yield named("up", "recomputed", "nt", tokens, i, h)
    widths = {"qkv": (3 * h, h), "out": (h, h), "up": (i, h), "down": (h, i)}  # outputs, inputs
    for what, (n, k) in widths.items():
        yield named(what, "plain", "nt", tokens, n, k)
    for what, (n, k) in widths.items():
        yield named(what, "plain", "tn", n, k, tokens)
        if what != "down":
            yield named(what, "plain", "nn", tokens, k, n)


def vocabulary_products(size: bert.Size, rows: int, vocab_size: int = bert.VOCAB_SIZE) -> Iterator[Product]:
    """Logits of a chunk of rows, the weight's gradient of a later chunk and of the first, the gradient of the rows."""
    what, h = f"{size.name} vocabulary", size.hidden
    yield Product(what, "plain", "nt", rows, vocab_size, h, has_bias=True)
    yield Product(what, "accumulate", "tn", vocab_size, h, rows, is_wide=True)
    yield Product(what, "plain", "tn", vocab_size, h, rows, is_wide=True)
    yield Product(what, "plain", "nn", rows, h, vocab_size, is_wide=True)


def _products() -> Iterator[Product]:
    for index, tokens in enumerate(TOKENS):
        for size in bert.SIZES:
            yield from layer_products(size, tokens)
            if index < len(CHUNKS):
                yield from vocabulary_products(size, CHUNKS[index])


PRODUCTS = tuple(_products())
_TINY = bert.Size("tiny", 48, 64)
SMALL_PRODUCTS = tuple(
    replace(product, dtype="fp32") for product in (*layer_products(_TINY, 40), *vocabulary_products(_TINY, 40, 71))
)


@dataclass
class Operands:
    """Tensors of one product: a, b as `_gemm.py` takes them; x: pre or dy, [m, n]; out: [m, n], added to or written."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    x: Tensor | None
    out: Tensor | None

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(t.nbytes for t in (self.a, self.b, self.bias, self.x, self.out) if t is not None)


def operands(product: Product, device: torch.device) -> Operands:
    """Random ones, whose product has values near 1; rows begin at whole 128 bytes, as those of logits do."""
    dtype, (m, n, k) = _DTYPES[product.dtype], (product.m, product.n, product.k)

    def matrix(rows: int, cols: int, letter: str = "n", scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        rows, cols = (cols, rows) if letter == "t" else (rows, cols)
        t = torch.empty(rows, -(-cols // ROW_UNIT) * ROW_UNIT, dtype=dtype, device=device)[:, :cols]
        t.copy_(torch.randn(rows, cols, device=device) * scale)
        return t.t() if letter == "t" else t

    a, b = matrix(m, k, product.layout[0]), matrix(k, n, product.layout[1], k**-0.5)
    has_x = product.kind in {"derivative", "recomputed"}
    has_out = product.kind in {"plain", "accumulate"}
    return Operands(
        a, b, torch.randn(n, device=device).to(dtype) if product.has_bias else None, matrix(m, n) if has_x else None,
        matrix(m, n, dtype=torch.float32 if product.is_wide else dtype) if has_out else None,
    )  # fmt: skip


def compute(product: Product, given: Operands, tile: "Tile | None") -> dict[str, Tensor]:
    """Results by name: of our kernel with this tile, or, for None, of the library and separate kernels."""
    from bert_fast.kernels import _gemm

    a, b, bias, x = given.a, given.b, given.bias, given.x

    def call() -> dict[str, Tensor | None]:
        if product.kind == "plain":
            return {"c": _gemm.product(a, b, bias, out=given.out, tile=tile)}
        if product.kind == "accumulate":
            return {"out": _gemm.product(a, b, out=given.out, accumulate=True, tile=tile)}
        if product.kind == "activation":
            y, pre = _gemm.product_activation(a, b, bias, HIDDEN_ACT, True, tile=tile)
            return {"y": y, "pre": pre}
        assert x is not None
        if product.kind == "derivative":
            dpre, act, dbias = _gemm.product_derivative(a, b, x, HIDDEN_ACT, True, True, tile=tile)
            return {"dpre": dpre, "act": act, "dbias": dbias}
        dpre, dbias = _gemm.product_recomputed(a, b, bias, x, HIDDEN_ACT, True, tile=tile)
        return {"dpre": dpre, "dbias": dbias}

    if tile is not None:
        results = call()
    else:
        with _gemm.by_library():
            results = call()
    return {name: t for name, t in results.items() if t is not None}


def truth(product: Product, given: Operands) -> dict[str, Tensor]:
    """The same in fp64, from the same rounded operands."""
    z = given.a.double() @ given.b.double()
    if given.bias is not None:
        z += given.bias.double()
    if product.kind == "plain":
        return {"c": z}
    if product.kind == "accumulate":
        assert given.out is not None
        return {"out": z + given.out}
    if product.kind == "activation":
        return {"y": F.gelu(z), "pre": z}
    assert given.x is not None
    x = given.x.double()
    if product.kind == "derivative":
        dpre = torch.ops.aten.gelu_backward(z, x)
        return {"dpre": dpre, "act": F.gelu(x), "dbias": dpre.sum(0)}
    dpre = torch.ops.aten.gelu_backward(x, z)
    return {"dpre": dpre, "dbias": dpre.sum(0)}


def tiles_for(product: Product, device: torch.device, is_specialized: bool = False) -> list["Tile"]:
    """Candidates for a device, and the same with the sum over K in parts where tiles are fewer than processors.

    is_specialized: those with warps of their own for loads, or all the others.
    """
    from bert_fast.kernels._gemm_tiles import candidates
    from bert_fast.kernels._launch import architecture, ceil_div, num_multiprocessors

    if device.type != "cuda":
        return []
    found: list[Tile] = []
    for tile in candidates(architecture(device), _DTYPES[product.dtype]):
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
    from bert_fast.kernels._gemm_table import source_hash

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
            text = f"{type(failure).__name__}: {str(failure)[:300]}"
            yield facts | {"candidate": name, "tile": tile.to_json(), "error": text}
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
        low, high = times.quantiles()
        same_rounds = replace(library, seconds=library.seconds[: len(times.seconds)])
        yield facts | {
            "candidate": contestant.provider,
            "tile": None if tile is None else tile.to_json(),
            "us": round(times.median * 1e6, 2),
            "us_p20": round(low * 1e6, 2),
            "us_p80": round(high * 1e6, 2),
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


def time_products(
    products: Iterable[Product],
    device: torch.device,
    rounds: int,
    write: Callable[[dict[str, Any]], object],
    leave_out: Callable[[Product, str], None],
    is_specialized: bool = False,
) -> None:
    """Times products one after the other; a failure leaves one out.

    is_specialized: with the tiles that have warps of their own for loads. Those are the likeliest to hang, which would
    cost all results that follow in the same process: so the others come first, in another process.
    """
    for product in products:
        if is_specialized and not tiles_for(product, device, True):
            continue
        try:
            results = list(time_product(product, device, rounds, is_specialized))
        except Exception as failure:  # memory of the device, say: the next may be smaller
            leave_out(product, f"{type(failure).__name__}: {str(failure)[:500]}")
            continue
        for result in results:
            write(result)
            rate = f"{result['us']:9.1f} us {result['tflop_s']:6.1f} TFLOP/s" if "us" in result else result["error"]
            print(f"{product.name:52} {result['candidate']:40} {rate}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 without a device, or where no table can be made."""
    from benchmarks.gemm_table import write_tables

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm_tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write-table", action="store_true", help="write tables instead of timing")
    parser.add_argument("--list", action="store_true", help="print the products and stop")
    parser.add_argument("--specialized", action="store_true", help="tiles with warps for loads, instead of all others")
    parser.add_argument("--only", default="", help="products whose name contains a text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all products together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder of the tables; default: that of the package")
    options = parser.parse_args(arguments)
    products = [product for product in PRODUCTS if options.only in product.name]
    if options.list:
        print("\n".join(product.name for product in products))
        return 0
    if options.write_table:
        return write_tables(options.results, options.output)
    if not torch.cuda.is_available():
        print("no CUDA or ROCm device: nothing was timed")
        return 1
    shared = gpu_environment()
    recorder = Recorder(options.results / f"{slug(shared['gpu'])}.jsonl", shared)

    def leave_out(product: Product, reason: str) -> None:
        recorder.write("skipped", part="gemm", family="gemm", case=product.name, provider=None, reason=reason)

    time_products(
        Seconds(options.seconds).of(products, leave_out), torch.device("cuda"), ROUNDS,
        lambda result: recorder.write("gemm", **result), leave_out, options.specialized,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
