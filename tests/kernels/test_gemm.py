"""The matrix-product kernels, in the interpreter, against fp64: epilogues, layouts, sizes, split sums, bytes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.testing.traffic import assert_traffic, traffic

from .gemm_products import KINDS, LAYOUTS, Operands, check, operands, ours

pytestmark = pytest.mark.interpreter
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16]
ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh"]


@pytest.fixture
def gemm() -> Any:
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    from bert_fast.triton import _gemm

    return _gemm


def tile(*blocks: int, **options: Any) -> Any:
    from bert_fast.triton._gemm_tiles import Tile

    return Tile(*(blocks or (32, 32, 32)), **options)


def by_pointers(given: Operands) -> Operands:
    """The same numbers at addresses that no tensor descriptor takes: rows start two bytes or four past 16."""

    def shifted(t: torch.Tensor) -> torch.Tensor:
        if t.dim() != 2:
            return t
        is_transposed = t.stride(0) == 1 and t.stride(1) != 1
        rows = t.t() if is_transposed else t
        room = torch.zeros(rows.numel() + 1, dtype=t.dtype)
        room[1:] = rows.reshape(-1)
        moved = room[1:].view(rows.shape)
        return moved.t() if is_transposed else moved

    return given.map(shifted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_epilogues_in_every_layout(gemm: Any, kind: str, layout: str, dtype: torch.dtype) -> None:
    """Sizes of whole 16 bytes that are no multiples of a tile: by tensor descriptor; then the same by pointer."""
    given = operands(40, 72, 80, dtype, layout)
    moved = check(gemm, given, kind, tile=tile())
    addressed = check(gemm, by_pointers(given), kind, tile=tile())
    assert all(torch.equal(moved[name], addressed[name]) for name in moved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["activation", "derivative", "recomputed"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(gemm: Any, act: str, kind: str, dtype: torch.dtype) -> None:
    check(gemm, operands(24, 40, 48, dtype), kind, act)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 7, 3), (15, 16, 17), (17, 15, 16), (63, 64, 65), (65, 63, 64), (37, 101, 13), (3, 8, 200)]
)
def test_sizes(gemm: Any, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for kind in ("activation", "derivative"):
        check(gemm, operands(*sizes, dtype), kind)
    check(gemm, operands(*sizes, dtype, "tn"), "accumulate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(0, 8, 16), (5, 0, 16), (5, 9, 0), (0, 0, 0)])
def test_empty(gemm: Any, sizes: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    """No rows, no columns; nothing to add up gives act(bias), and leaves what is accumulated to as it is."""
    check(gemm, operands(*sizes, dtype), kind)
    check(gemm, operands(*sizes, dtype), kind, tile=tile(split_k=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_split_sums(gemm: Any, kind: str, dtype: torch.dtype) -> None:
    """Parts of one length, of different lengths, and more parts than steps; rows that are no whole tiles."""
    for k, splits in ((64, 2), (136, 3), (40, 8)):
        check(gemm, operands(36, 40, k, dtype), kind, tile=tile(split_k=splits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"parts": 2}, {"parts": 4}, {"group_m": 1}, {"group_m": 3}, {"resident": 3}])
def test_tiles_give_the_same_numbers(gemm: Any, options: dict[str, int], dtype: torch.dtype) -> None:
    """The order in which tiles are made, and in what parts they are finished, changes no bit."""
    given = operands(72, 136, 32, dtype, "nn")
    first, second = (ours(gemm, given, "derivative", tile=tile(32, 64, 16, **o)) for o in ({}, options))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_warp_specialized_tiles(gemm: Any, kind: str) -> None:
    """Their descriptors are made on the device."""
    for options in ({}, {"split_k": 2}):
        check(gemm, operands(40, 72, 80, torch.float16), kind, tile=tile(warp_specialize=True, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_half_precision_with_fp32_bias(gemm: Any, has_bias: bool, kind: str) -> None:
    check(gemm, operands(24, 40, 32, torch.float16, has_bias=has_bias, bias_dtype=torch.float32), kind)


def test_fp32_results_of_half_precision_are_rounded_once(gemm: Any) -> None:
    given = operands(24, 40, 64, torch.float16, "tn", has_bias=False)
    truth = given.a.double() @ given.b.double()
    for options in ({}, {"split_k": 2}):
        wide = gemm.product(given.a, given.b, out_dtype=torch.float32, tile=tile(**options))
        assert wide.dtype == torch.float32
        assert (wide - truth).abs().max() < ABSOLUTE["fp32_product_of_half"]


@pytest.mark.parametrize("is_librarys", [False, True])
def test_sums_in_half_precision_are_rounded_once(gemm: Any, is_librarys: bool) -> None:
    given = operands(24, 40, 64, torch.float16, has_bias=False)
    out = torch.randn(24, 40).half()
    truth = out.double() + given.a.double() @ given.b.double()
    with gemm.by_library() if is_librarys else nullcontext():
        assert gemm.product(given.a, given.b, out=out, accumulate=True) is out
    assert ((out - truth).abs() <= truth.abs() * torch.finfo(torch.float16).eps * 0.501 + 1e-5).all()


def test_out_is_written_where_it_lies(gemm: Any) -> None:
    """Also into columns of a wider tensor, whose other columns stay as they are."""
    given = operands(20, 24, 32, torch.float16)
    expected = gemm.product(given.a, given.b, given.bias)
    for width, first in ((40, 8), (41, 3)):
        room = torch.full((20, width), 7.0, dtype=torch.float16)
        out = room[:, first : first + 24]
        assert gemm.product(given.a, given.b, given.bias, out=out) is out
        assert torch.equal(out, expected)
        assert (room[:, :first] == 7).all() and (room[:, first + 24 :] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["row-strided", "expanded", "strided both ways"])
def test_strides(gemm: Any, layout: str, kind: str) -> None:
    def relaid(t: torch.Tensor) -> torch.Tensor:
        if t.dim() != 2 or t.dtype == torch.float32:
            return t
        if layout == "row-strided":
            return torch.cat([t, t + 1], dim=1)[:, : t.shape[1]]
        if layout == "expanded":
            return t[:1].expand_as(t)
        return t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]

    check(gemm, operands(20, 24, 40, torch.float16).map(relaid), kind)


def test_operands_that_cannot_be_described_are_told(gemm: Any) -> None:
    from bert_fast.triton._gemm_tiles import has_aligned_rows, row_major

    t = torch.zeros(16, 24, dtype=torch.float16)
    assert has_aligned_rows(t) and has_aligned_rows(t[:, :5])
    for bad in (t[:, 1:], torch.zeros(16, 23, dtype=torch.float16), t[:1].expand(16, 24), t.t(), t[:0]):
        assert not has_aligned_rows(bad), bad.stride()
    assert not row_major(t)[1] and row_major(t.t())[1]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_repeat_bit_for_bit(gemm: Any, kind: str) -> None:
    given = operands(40, 40, 72, torch.float16)
    for options in ({}, {"split_k": 3}):
        first, second = (ours(gemm, given, kind, tile=tile(**options)) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["activation", "derivative", "recomputed"])
@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_small_and_large_numbers(gemm: Any, scale: float, kind: str) -> None:
    check(gemm, operands(24, 40, 32, torch.float16).map(lambda t: t * scale), kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_number_spoils_its_row_and_its_column_sums(gemm: Any) -> None:
    given = operands(40, 24, 32, torch.float16)
    given.a[7, 3] = float("nan")
    results = ours(gemm, given, "derivative", tile=tile())
    bad = torch.zeros(40, dtype=torch.bool)
    bad[7] = True
    assert torch.equal(results["dpre"].isnan().any(1), bad) and results["dpre"][7].isnan().all()
    assert results["dbias"].isnan().all() and not results["act"].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_gives_the_same(gemm: Any, kind: str) -> None:
    """What `by_library` computes, also where half precision and an fp32 bias meet."""
    for dtype in DTYPES:
        given = operands(24, 40, 32, dtype, bias_dtype=torch.float32)
        with gemm.by_library():
            check(gemm, given, kind)
    with gemm.by_library():
        wide = gemm.product(given.a, given.b, given.bias, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert (wide - (given.a.double() @ given.b.double() + given.bias)).abs().max() < ABSOLUTE["fp32_product_of_half"]


def test_bytes_are_those_of_the_docstring(gemm: Any) -> None:
    """Operands once per tile of the other side, x, y and z once, 4 bytes a column and row block for column sums."""
    m, n, k, block = 64, 96, 64, 32
    given = operands(m, n, k, torch.float16, "nn", has_bias=False)
    e, from_cache = 2, (m * k * (n // block) + k * n * (m // block)) * 2
    sums = 4 * n * (m // block)
    floors = {
        "plain": from_cache + m * n * e,
        "activation": from_cache + 2 * m * n * e,
        "derivative": from_cache + 3 * m * n * e + 2 * sums + 4 * n,
        "recomputed": from_cache + 2 * m * n * e + 2 * sums + 4 * n,
        "accumulate": from_cache + 2 * m * n * 4,
    }
    for kind, floor in floors.items():
        for at in (given, by_pointers(given)):
            with traffic() as counts:
                ours(gemm, at, kind, tile=tile())
            assert_traffic(counts, floor)
            assert counts.unique_loaded_bytes(given.x) in (0, given.x.nbytes)
        with traffic() as counts:
            ours(gemm, given, kind, tile=tile(split_k=2))
        split_sums = 2 * 4 * n * (m // 16) + 4 * n if kind in ("derivative", "recomputed") else 0
        results = floor - from_cache - (2 * sums + 4 * n if split_sums else 0)
        assert_traffic(counts, from_cache + results + split_sums + 2 * 2 * 4 * m * n)


def test_offsets_beyond_two_to_the_31(gemm: Any, tmp_path: Any) -> None:
    """The second row of every matrix lies 2^31 + 8 elements behind the first, in a sparse file that takes no space."""
    stride = 2**31 + 8
    near = operands(2, 16, 16, torch.float16)
    names = iter("axo")

    def far_apart(t: torch.Tensor) -> torch.Tensor:
        storage = torch.from_file(str(tmp_path / next(names)), shared=True, size=stride + 16, dtype=t.dtype)
        return storage.as_strided((2, 16), (stride, 1)).copy_(t)

    far = Operands(far_apart(near.a), near.b, near.bias, far_apart(near.x), near.out)
    for kind in ("derivative", "recomputed"):
        first, second = ours(gemm, near, kind), ours(gemm, far, kind)
        assert all(torch.equal(first[name], second[name]) for name in first)
    out = far_apart(near.x)
    gemm.product(near.a, near.b, near.bias, out=out)
    assert torch.equal(out, gemm.product(near.a, near.b, near.bias))
