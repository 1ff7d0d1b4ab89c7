"""The Triton kernels of attention, in the interpreter, against the fp64 reference: packed, causal, with dropout.

Bias and relative positions: test_attention_extras.py.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference.attention import Attention
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.traffic import assert_traffic, traffic
from bert_fast.triton._attention_tiles import launch_config, short_config
from bert_fast.triton._launch import architecture, assume_architecture, ceil_div

from .attention_grid import OP, arguments_of, check, heads_first, in_fused_buffer, pairwise, run

pytestmark = [
    pytest.mark.interpreter,
    # Infinite scores, whose results are selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.float16]
HEAD_DIMS = [16, 24, 32, 40, 64, 80, 96, 128]
LENGTHS = [1, 2, 13, 31, 32, 33, 61, 63, 64, 65, 97, 127, 128, 129]
OTHER_LENGTHS = [(1, 33), (33, 1), (1, 130), (130, 1), (31, 65), (65, 31), (65, 130), (130, 65)]
MIXED = {
    "no sequences": ((), None),
    "only empty ones": ((0, 0), None),
    "empty at start, middle and end": ((0, 5, 0, 0, 33, 1, 0), None),
    "long and short": ((1, 70, 2), None),
    "fewer keys": ((40, 3, 66), (3, 1, 33)),
    "more keys": ((3, 1, 33), (40, 3, 66)),
    "queries without keys": ((5, 2, 34), (0, 7, 0)),
    "keys without queries": ((0, 2, 0), (9, 3, 40)),
    "either side empty": ((0, 4, 0, 3, 0), (6, 0, 0, 2, 5)),
    "no keys at all": ((3, 2), (0, 0)),
    "no queries at all": ((0, 0), (3, 2)),
}


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(kernels, length: int, dtype: torch.dtype, causal: bool) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase((length,), num_heads=1, head_dim=32, dropout_p=0.1, causal=causal), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("length", [191, 256, 257, 577])
@pytest.mark.parametrize("dtype", DTYPES)
def test_longer_sequences(kernels, length: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    if dtype == torch.float32:
        length = length // 4  # enough: smaller tiles
    causal = length % 3 == 1
    check(kernels, AttentionCase((length,), num_heads=1, head_dim=64, dropout_p=0.1, causal=causal), dtype)


@pytest.mark.parametrize("lengths", OTHER_LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_other_lengths_of_keys(kernels, lengths: tuple[int, int], causal: bool) -> None:  # type: ignore[no-untyped-def]
    num_queries, num_keys = lengths
    case = AttentionCase((num_queries,), (num_keys,), num_heads=1, head_dim=16, dropout_p=0.1, causal=causal)
    check(kernels, case, torch.float32)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("causal", "dropout_p"), [(False, 0.0), (True, 0.1)])
def test_mixed_batches(kernels, name: str, dtype: torch.dtype, causal: bool, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase(*MIXED[name], head_dim=16, dropout_p=dropout_p, causal=causal), dtype)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths_k", [None, (2, 1, 9), (7, 0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_on_tiny_batches(  # type: ignore[no-untyped-def]
    kernels, dropout_p: float, causal: bool, lengths_k: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """Without causality positions say nothing, without dropout rows say nothing."""
    for holes, order in itertools.product([False, True][: 1 + causal], [None, (2, 0, 1)][: 1 + bool(dropout_p)]):
        case = AttentionCase((5, 0, 7), lengths_k, 1, 24, dropout_p=dropout_p, causal=causal, holes=holes, order=order)
        check(kernels, case, dtype)


def in_order(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return inputs


GRID = pairwise(
    lengths=[
        ((5,), None), ((33, 0, 17), None), ((2, 35), (35, 2)), ((4, 0, 9), (0, 3, 66)), ((97,), None), ((130,), None),
        ((3,), (130,)), ((130,), (3,)),
    ],
    head_dim=HEAD_DIMS,
    dropout_p=[0.0, 0.1, 0.5, 1.0],
    causal=[False, True],
    dtype=DTYPES,
    layout=[in_order, in_fused_buffer, heads_first],
    softmax_scale=[None, 0.1, -0.15, 0.0],
    holes=[False, True],
    ordered=[False, True],
    num_heads=[1, 2],
)  # fmt: skip


def id_of(combination: dict[str, Any]) -> str:
    return "-".join(getattr(value, "__name__", str(value)).replace(" ", "") for value in combination.values())


@pytest.mark.parametrize("combination", GRID, ids=id_of)
def test_any_two_features(kernels, combination: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    features = dict(combination)
    lengths, lengths_k = features.pop("lengths")
    dtype, layout, ordered = (features.pop(name) for name in ("dtype", "layout", "ordered"))
    if layout is in_fused_buffer and lengths_k is not None:
        layout = heads_first
    case = AttentionCase(lengths, lengths_k, **features)
    order = torch.arange(len(lengths), dtype=torch.int32).flip(0) if ordered else None
    check(kernels, case, dtype, layout(case.inputs(dtype)), sequence_order=order)


def test_the_grid_holds_any_two_features() -> None:
    rows = [[str(value) for value in combination.values()] for combination in GRID]
    for a, b in itertools.combinations(range(len(rows[0])), 2):
        met = {(row[a], row[b]) for row in rows}
        assert len(met) == len({row[a] for row in rows}) * len({row[b] for row in rows})


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 70), (torch.float16, 140)])
def test_head_dims_beyond_one_block(kernels, head_dim: int, dtype: torch.dtype, length: int) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase((length,), num_heads=1, head_dim=head_dim, dropout_p=0.1), dtype)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_narrower_than_a_tensor_core(kernels, head_dim: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase((9, 66), num_heads=1, head_dim=head_dim, dropout_p=0.1), dtype)


# Causal order and names of tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("lengths", [((1, 1, 1), (9, 40, 1)), ((3, 33), (70, 33)), ((1,), (129,)), ((65,), (130,))])
def test_queries_at_the_end_of_cached_keys(kernels, lengths: tuple, holes: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase(*lengths, num_heads=1, head_dim=32, causal=True, cached=True, holes=holes, dropout_p=0.1)
    check(kernels, case, dtype)


@pytest.mark.parametrize("ahead", [30, 31, 32, 62, 63, 64, 95])
def test_full_tiles_end_where_the_first_query_sees(kernels, ahead: int) -> None:  # type: ignore[no-untyped-def]
    """Keys before the first query: a tile of them needs no mask if it sees all, to the last key."""
    case = AttentionCase((70,), (70 + ahead,), num_heads=1, head_dim=72, causal=True, cached=True)
    check(kernels, case, torch.float16)


@pytest.mark.parametrize("length", [5, 33, 70, 129])
def test_causal_by_position_not_by_order(kernels, length: int) -> None:  # type: ignore[no-untyped-def]
    """Padding on the left and inside: positions are far apart, and differ between queries and keys."""
    check(kernels, AttentionCase((length, 3, length), num_heads=1, head_dim=16, causal=True, holes=True), torch.float32)


def test_queries_before_every_key_see_nothing(kernels) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((40,), (50,), head_dim=16, causal=True, dropout_p=0.1)
    inputs = case.inputs(torch.float32)
    a = arguments_of(case, inputs)
    later = a.coords_k + torch.tensor([0, 17], dtype=torch.int32)
    results = run(kernels, a._replace(coords_k=later), inputs["dout"])
    assert (results["lse"][:, :17] == -torch.inf).all() and torch.isfinite(results["lse"][:, 17:]).all()
    assert not results["out"][:17].any() and not results["dq"][:17].any()
    # Keys from 23 on stand behind every query.
    assert not results["dk"][23:].any() and not results["dv"][23:].any()
    assert all(torch.isfinite(results[name]).all() for name in ("out", "dq", "dk", "dv"))


# Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 65, 130])
@pytest.mark.parametrize(("softmax_scale", "dropout_p"), [(300.0, 0.3), (-300.0, 0.0)])
def test_scores_near_10000(  # type: ignore[no-untyped-def]
    kernels, length: int, dtype: torch.dtype, softmax_scale: float, dropout_p: float
) -> None:
    """One key takes nearly all; the others underflow."""
    case = AttentionCase((length,), num_heads=1, head_dim=64, softmax_scale=softmax_scale, dropout_p=dropout_p)
    check(kernels, case, dtype, units={"dq": 300.0, "dk": 300.0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_all_far_from_zero(kernels, dtype: torch.dtype, sign: float) -> None:  # type: ignore[no-untyped-def]
    """Every score of a row near -4,000 or 4,000: without subtracting the largest nothing is left."""
    case = AttentionCase((40, 3, 70), head_dim=16, dropout_p=0.1)
    inputs = case.inputs(dtype)
    inputs["q"][..., 0], inputs["k"][..., 0] = sign * 128.0, 128.0
    check(kernels, case, dtype, inputs, units={"dq": 128.0, "dk": 128.0})


# Order, repetition, bounds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths_k", [None, (6, 35, 0, 70)])
def test_the_order_of_sequences_changes_no_bit(kernels, dtype: torch.dtype, lengths_k: tuple[int, ...] | None) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((7, 33, 0, 40), lengths_k, num_heads=1, head_dim=16, dropout_p=0.1, causal=True)
    inputs = case.inputs(dtype)
    a = arguments_of(case, inputs)
    expected = run(kernels, a, inputs["dout"])
    for order in ((3, 1, 0, 2), (2, 0, 1, 3)):
        ordered = a._replace(sequence_order=torch.tensor(order, dtype=torch.int32))
        results = run(kernels, ordered, inputs["dout"])
        assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("dtype", "lengths"), [(torch.float32, (9, 40)), (torch.float16, (9, 40)), (torch.float16, (130,))]
)
def test_runs_repeat_bit_for_bit(kernels, lengths: tuple[int, ...], dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase(lengths, head_dim=32, dropout_p=0.1)
    inputs = case.inputs(dtype)
    first, second = (run(kernels, arguments_of(case, inputs), inputs["dout"]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bound", [41, 64, 100, 129, 400])
def test_bounds_of_lengths_may_be_generous(kernels, bound: int) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((5, 40, 0), head_dim=16, dropout_p=0.1, causal=True)
    check(kernels, case, torch.float16, max_seqlen_q=bound, max_seqlen_k=bound)


@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_numbers_of_heads(kernels, num_heads: int) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase((6, 0, 17), num_heads=num_heads, head_dim=16, dropout_p=0.1), torch.float32)


@pytest.mark.parametrize("name", ["no sequences", "only empty ones", "no keys at all", "no queries at all"])
def test_nothing_to_attend_to_or_with(kernels, name: str) -> None:  # type: ignore[no-untyped-def]
    results = check(kernels, AttentionCase(*MIXED[name], head_dim=16, dropout_p=0.1), torch.float32)
    assert not any(t.any() for name, t in results.items() if name != "lse")


def test_saved_logarithms_are_natural_and_without_dropout(kernels) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((20,), num_heads=2, head_dim=16, dropout_p=0.5)
    a = arguments_of(case, case.inputs(torch.float32))
    _, lse, _ = kernels.attention_fwd(a._replace(q=torch.zeros(20, 2, 16)))
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full((2, 20), math.log(20)))


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 193, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_half_precision(kernels, length: int, causal: bool) -> None:  # type: ignore[no-untyped-def]
    """Heads too wide for the short kernels: full tiles have loops of their own, before and behind partial ones."""
    case = AttentionCase((length,), num_heads=1, head_dim=72, dropout_p=0.1, causal=causal, holes=length == 128)
    check(kernels, case, torch.float16)


@pytest.mark.parametrize("processor", ["sm_80", "sm_86", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "lengths", "head_dim"),
    [
        (torch.float16, (20, 1), 32), (torch.float16, (60, 33), 16), (torch.float16, (128, 70), 64),
        (torch.float16, (150,), 40), (torch.float16, (140,), 80), (torch.float32, (70,), 24),
        (torch.float32, (40,), 96),
    ],
)  # fmt: skip
def test_tiles_of_other_processors(  # type: ignore[no-untyped-def]
    kernels, processor: str, dtype: torch.dtype, lengths: tuple[int, ...], head_dim: int
) -> None:
    with assume_architecture(processor):
        check(kernels, AttentionCase(lengths, None, 1, head_dim, dropout_p=0.1, causal=True), dtype)


# Memory


def floors(a: Attention, is_stored: bool) -> tuple[float, float]:
    """Bytes that forward and backward must move by the docstring of `kernels/attention.py`, for a single sequence.

    is_stored: whether dropout's mask is.
    """
    (num_queries, num_heads, head_dim), num_keys, dtype = a.q.shape, len(a.k), a.q.dtype
    queries, keys = (n * head_dim * dtype.itemsize for n in (num_queries, num_keys))
    lse, names = 4 * num_queries, 8 * num_queries if a.dropout_p else 0
    where = architecture(a.q.device)
    if short_config(max(num_queries, num_keys), head_dim, dtype, where, a.dropout_p > 0) is not None:
        return num_heads * (2 * queries + 2 * keys + lse + names), num_heads * (4 * queries + 4 * keys + lse + names)
    config = launch_config(head_dim, dtype, where, False, a.dropout_p > 0, is_stored)
    words = ceil_div(num_queries, 16) * ceil_div(num_keys, 64) * 128 if is_stored else 0
    of_forward = names
    names = 0 if is_stored else names
    forward = 2 * queries + lse + of_forward + words + ceil_div(num_queries, config.forward.block_m) * 2 * keys
    dq = 4 * queries + 2 * lse + names + words + ceil_div(num_queries, config.dq.block_m) * 2 * keys
    dkdv = 4 * keys + words + ceil_div(num_keys, config.dkdv.block_n) * (2 * queries + 2 * lse + names)
    return num_heads * forward, num_heads * (dq + dkdv)


@pytest.mark.parametrize(
    ("dtype", "num_queries", "num_keys"),
    [
        (torch.float16, 64, 64), (torch.float16, 128, 100), (torch.float16, 192, 130), (torch.float16, 70, 200),
        (torch.float32, 64, 64), (torch.float32, 100, 40),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_bytes_are_those_of_the_docstring(  # type: ignore[no-untyped-def]
    kernels, dtype: torch.dtype, num_queries: int, num_keys: int, dropout_p: float
) -> None:
    case = AttentionCase((num_queries,), (num_keys,), num_heads=2, head_dim=32, dropout_p=dropout_p)
    inputs = case.inputs(dtype)
    a = arguments_of(case, inputs)
    forward_floor, backward_floor = floors(a, kernels.stores_mask(a))
    with traffic() as forward:
        out, lse, mask = kernels.attention_fwd(a)
    assert_traffic(forward, forward_floor)
    assert forward.times_loaded(a.q) == {1} == forward.times_stored(out) == forward.times_stored(lse)
    assert mask is None or forward.times_stored(mask) <= {0, 1}
    with traffic() as backward:
        made = kernels.attention_bwd(a, inputs["dout"], out, lse, mask, set())
    assert_traffic(backward, backward_floor)
    assert all(backward.times_stored(made[name]) == {1} for name in "qkv")


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_attention_reads_no_tile_that_nobody_sees(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    length, head_dim = (256, 80) if dtype == torch.float16 else (64, 16)
    case = AttentionCase((length,), num_heads=1, head_dim=head_dim, causal=True)
    inputs = case.inputs(dtype)
    a = arguments_of(case, inputs)
    config = launch_config(head_dim, dtype, architecture(a.q.device), True, False)
    with traffic() as forward:
        out, lse, mask = kernels.attention_fwd(a)
    for token in range(length):  # a key is read by the blocks whose last query stands at it or behind, by tiles
        tile = token // config.forward.block_n * config.forward.block_n
        readers = length // config.forward.block_m - tile // config.forward.block_m
        assert forward.times_loaded(a.k[token]) == {readers} == forward.times_loaded(a.v[token])
    with traffic() as backward:
        kernels.attention_bwd(a, inputs["dout"], out, lse, mask, set())
    for token in range(length):  # a query's gradient: once for dq, once for every block of keys that stands before it
        last = token // config.dkdv.block_m * config.dkdv.block_m + config.dkdv.block_m - 1
        readers = 1 + last // config.dkdv.block_n + 1
        assert backward.times_loaded(inputs["dout"][token]) == {readers}
