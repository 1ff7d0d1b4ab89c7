"""The matrix products of BERT, forward and backward: operands, our kernel's and the library's results, the truth."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kit import bert

if TYPE_CHECKING:
    from bert_fast.triton._gemm_tiles import Tile

TOKENS = (16384, 4096, 32768, 8192, 65536, 2048, 1024)  # the most telling first
CHUNKS = (2048, 1024, 512)  # labelled rows whose logits linear_cross_entropy makes at once
ROW_UNIT = 64  # elements
HIDDEN_ACT = "gelu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Product:
    """One matrix product [m, k] x [k, n] with what follows it, as `bert_fast/triton/_gemm_tiles.py` tells them apart.

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
    family: ClassVar[str] = "gemm"

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
    dtype, (m, n, k) = DTYPES[product.dtype], (product.m, product.n, product.k)

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
    from bert_fast.triton import _gemm

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
            dpre, act, dbias = _gemm.product_derivative(a, b, x, HIDDEN_ACT, True, torch.float32, tile=tile)
            return {"dpre": dpre, "act": act, "dbias": dbias}
        dpre, dbias = _gemm.product_recomputed(a, b, bias, x, HIDDEN_ACT, torch.float32, tile=tile)
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
