"""The matrix-product kernels on a GPU: every tile that ships with every epilogue, at BERT's shapes."""

from dataclasses import replace

import pytest
import torch

from bert_fast.testing.compare import assert_close_to_truth

from .gemm_products import KINDS, LAYOUTS, check, operands, ours

pytestmark = pytest.mark.gpu

# (kind, layout) of BERT's products -> tokens, and the two sizes of a weight
SHAPES = [(4096, 3072, 768), (4133, 4096, 1024)]
LAYOUT = {"plain": "nt", "accumulate": "tn", "activation": "nt", "derivative": "nn", "recomputed": "nt"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _tiles(dtype: torch.dtype) -> list[object]:
    from bert_fast.triton._gemm_tiles import candidates
    from bert_fast.triton._launch import architecture

    return list(candidates(architecture(torch.device("cuda")), dtype))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_with_every_epilogue(kind: str, shape: tuple[int, int, int], number: int) -> None:
    from bert_fast.triton import _gemm

    tile = _tiles(torch.bfloat16)[number]
    given = operands(*shape, torch.bfloat16, LAYOUT[kind], device="cuda")
    first = check(_gemm, given, kind, tile=tile)
    second = ours(_gemm, given, kind, tile=tile)
    assert all(torch.equal(first[name], second[name]) for name in first), "two runs differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_dtypes(kind: str, layout: str, dtype: torch.dtype) -> None:
    from bert_fast.triton import _gemm

    check(_gemm, operands(520, 776, 264, dtype, layout, device="cuda"), kind, tile=_tiles(dtype)[0])


@pytest.mark.parametrize("act", ["gelu_new", "relu", "silu", "tanh"])
@pytest.mark.parametrize("kind", ["activation", "derivative", "recomputed"])
def test_activations(kind: str, act: str) -> None:
    from bert_fast.triton import _gemm

    tile = _tiles(torch.bfloat16)[1]
    check(_gemm, operands(1024, 3072, 768, torch.bfloat16, device="cuda"), kind, act, tile=tile)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 7, 3), (65, 63, 64), (1021, 509, 251), (5, 9, 0), (0, 9, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes(kind: str, sizes: tuple[int, int, int]) -> None:
    """By pointer, whatever the processor; and what is chosen for them."""
    from bert_fast.triton import _gemm

    given = operands(*sizes, torch.bfloat16, device="cuda")
    check(_gemm, given, kind, tile=_tiles(torch.bfloat16)[3])
    check(_gemm, given, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_split_sums(kind: str) -> None:
    from bert_fast.triton import _gemm

    tile = replace(_tiles(torch.bfloat16)[3], split_k=7)
    check(_gemm, operands(768, 776, 4099 if kind == "accumulate" else 4096, torch.bfloat16, "tn", device="cuda"), kind,
          tile=tile)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_gives_the_same(kind: str, dtype: torch.dtype) -> None:
    """fp32 sums and results of half precision without a rounding, or a copy, in between."""
    from bert_fast.triton import _gemm

    given = operands(520, 776, 264, dtype, LAYOUT[kind], device="cuda", bias_dtype=torch.float32)
    with _gemm.by_library():
        check(_gemm, given, kind)
        out = torch.empty(520, 776, device="cuda")
        assert _gemm.product(given.a, given.b, given.bias, out=out) is out
    plain, truth = given.a.float() @ given.b.float(), given.a.double() @ given.b.double()
    assert_close_to_truth("gemm", "c", out, plain + given.bias, truth + given.bias)


def test_results_beyond_two_to_the_31_elements() -> None:
    """Rows of logits: the last ones of an output of more than 2^31 elements, by tensor descriptor and by pointer."""
    from bert_fast.triton import _gemm

    rows, k = 71000, 64
    for columns in (30528, 30522):
        given = operands(rows, columns, k, torch.bfloat16, device="cuda")
        c = _gemm.product(given.a, given.b, given.bias, tile=_tiles(torch.bfloat16)[0])
        last = given.a[rows - 300 :]
        plain, truth = last @ given.b + given.bias, last.double() @ given.b.double() + given.bias
        assert_close_to_truth("gemm", "c", c[rows - 300 :], plain, truth)
        del given, c, plain, truth
