"""Bias and relative positions in the Triton kernels of attention, in the interpreter: forward, gradients."""

import itertools
from typing import Any

import pytest
import torch

from bert_fast.testing.attention import TABLES, AttentionCase
from bert_fast.testing.traffic import traffic

from .attention_grid import EXTRAS, arguments_of, check, heads_first, pairwise, run

pytestmark = [
    pytest.mark.interpreter,
    # Infinite scores, whose results are selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.float16]
FORMS = ["".join(letters) for size in range(5) for letters in itertools.combinations("BAQK", size)]
RELATIVE = ["C", "P", "CP"]


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    from bert_fast.triton import attention

    return attention


# Bias


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_forms(kernels, form: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """All forms, in rows that are not in the order of the sequences."""
    case = AttentionCase((3, 0, 6), head_dim=16, dropout_p=0.1, holes=True, order=(2, 0, 1), bias=form)
    check(kernels, case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths_k", [None, (40, 3, 66)])
def test_over_several_tiles(kernels, dtype: torch.dtype, lengths_k: tuple[int, ...] | None) -> None:  # type: ignore[no-untyped-def]
    check(kernels, AttentionCase((70, 5, 33), lengths_k, head_dim=16, bias="AQK"), dtype)


@pytest.mark.parametrize("form", ["BAQK", "QK", "BQ", "K"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_that_removes_keys(kernels, form: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Some keys of a query, and all keys of some queries."""
    case = AttentionCase((9, 35), head_dim=16, bias=form, removes=True, dropout_p=0.1)
    bias = case.inputs(dtype)["bias"]
    assert (bias == -torch.inf).any() and ("Q" not in form or (bias == -torch.inf).all(-1).any())
    results = check(kernels, case, dtype)
    assert not results["dbias"][bias == -torch.inf].any(), "what is removed has no gradient"


@pytest.mark.parametrize("features", pairwise(
    lengths=[((7, 0, 35), None), ((33, 4, 0), (5, 40, 3)), ((2, 34), (34, 2))],
    dtype=DTYPES, dropout_p=[0.0, 0.1, 1.0], causal=[False, True], holes=[False, True], cached=[False, True],
    bias=[None, "BAQK", "K"], relative=["", *RELATIVE], head_dim=[16, 24],
), ids=lambda features: "-".join(str(value).replace(" ", "") for value in features.values()))  # fmt: skip
def test_pairs_of_features(kernels, features: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    others = {name: value for name, value in features.items() if name not in ("lengths", "dtype")}
    check(kernels, AttentionCase(*features["lengths"], **others), features["dtype"])


def test_rows_of_two_sequences(kernels) -> None:  # type: ignore[no-untyped-def]
    """Two documents that share a row add to the same gradient."""
    case = AttentionCase((5, 33, 4), head_dim=16, bias="BAQK", order=(1, 0, 1), dropout_p=0.1)
    check(kernels, case, torch.float32)


@pytest.mark.slow
def test_many_sequences(kernels) -> None:  # type: ignore[no-untyped-def]
    """More than are looked through at once."""
    case = AttentionCase((1,) * 131 + (2, 0, 3), num_heads=1, head_dim=16, bias="BQK")
    check(kernels, case, torch.float32)


@pytest.mark.parametrize("offset", [1, 100])
def test_positions_far_from_zero(kernels, offset: int) -> None:  # type: ignore[no-untyped-def]
    """As padding on the left makes them; the bias reaches farther than any token."""
    case = AttentionCase((5, 36), head_dim=16, bias="QK", relative="CP", causal=True)
    inputs = case.inputs(torch.float32)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    size, reach = 36, slice(offset, offset + 36)
    moved = torch.nn.functional.pad(inputs["bias"], (offset, 40, offset, 40), value=5.0)
    a = arguments_of(case, inputs | {"bias": moved})
    coords = a.coords_q + torch.tensor([0, offset]).int()
    results = run(kernels, a._replace(coords_q=coords, coords_k=coords), inputs["dout"])
    for name in ("out", "lse", "dq", "dk", "dv", "drelative_keys", "drelative_queries"):
        torch.testing.assert_close(results[name], expected[name])
    assert expected["dbias"].shape[2:] == (size, size)
    torch.testing.assert_close(results["dbias"][:, :, reach, reach], expected["dbias"])
    outside = results["dbias"].clone()
    outside[..., reach] = 0.0
    assert not outside.any(), "dbias is 0 where no token stands"


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Transposed and expanded biases, heads that stand first: the same bits."""
    case = AttentionCase((7, 34), head_dim=16, bias="BAQK", dropout_p=0.1)
    inputs = case.inputs(dtype)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    bias = inputs["bias"]
    for moved in (
        bias.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        bias.repeat_interleave(2, dim=3)[..., ::2],
    ):
        relaid = heads_first(inputs) | {"bias": moved}
        results = run(kernels, arguments_of(case, relaid), relaid["dout"])
        assert all(torch.equal(results[name], expected[name]) for name in expected)
    expanded = inputs | {"bias": inputs["bias"][:1, :, :1].expand_as(inputs["bias"])}
    check(kernels, case, dtype, expanded)


@pytest.mark.parametrize("missing", ["queries", "keys", "rows"])
def test_nothing_is_read_past_the_end(kernels, missing: str) -> None:  # type: ignore[no-untyped-def]
    """A bias that does not reach all tokens, which no one checks on a GPU: foreign memory (here NaN) must not count."""
    case = AttentionCase((9, 12), head_dim=16, bias="BAQK", relative="CP")
    inputs = case.inputs(torch.float32)
    rows, heads, queries, keys = inputs["bias"].shape
    shape = {"queries": (rows, heads, 3, keys), "keys": (rows, heads, queries, 3), "rows": (1, heads, queries, keys)}
    size = torch.Size(shape[missing]).numel()
    memory = torch.full((rows * heads * queries * keys * 8,), torch.nan)
    memory[:size] = 1.0
    strides = torch.empty(shape[missing]).stride()
    # A size of 1 would be broadcast: stride and size as if there were a second row.
    inputs["bias"] = memory[:size].as_strided(shape[missing], strides)
    for name in TABLES.values():
        inputs[name] = torch.full((400, 2, 16), torch.nan)[100:111].fill_(1.0)
    results = run(kernels, arguments_of(case, inputs), inputs["dout"])
    assert all(torch.isfinite(result).all() for result in results.values())


# Relative positions


@pytest.mark.parametrize("relative", RELATIVE)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("lengths", [((34, 0, 3), None), ((3, 1, 33), (66, 0, 31))], ids=str)
def test_relative_positions(kernels, relative: str, holes: bool, lengths: Any) -> None:  # type: ignore[no-untyped-def]
    """Either dtype with each of the others' choices."""
    dtype = DTYPES[(RELATIVE.index(relative) + holes + (lengths[1] is None)) % 2]
    check(kernels, AttentionCase(*lengths, head_dim=16, relative=relative, holes=holes), dtype)


@pytest.mark.parametrize(("relative", "causal"), [("C", False), ("P", True), ("CP", True), ("CP", False)])
def test_relative_positions_with_wide_holes(kernels, relative: str, causal: bool) -> None:  # type: ignore[no-untyped-def]
    """Every ninth position: a tile spans several windows. As without holes, with every ninth row of the tables."""
    case = AttentionCase((20, 5), num_heads=1, head_dim=16, relative=relative, causal=causal)
    inputs = case.inputs(torch.float32)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    names = [TABLES[letter] for letter in relative]
    sparse = {name: torch.full((9 * len(inputs[name]), 1, 16), 7.0)[:-8] for name in names}
    for name, table in sparse.items():
        table[::9] = inputs[name]
    a = arguments_of(case, inputs | sparse)
    coords = a.coords_q * torch.tensor([1, 9]).int()
    results = run(kernels, a._replace(coords_q=coords, coords_k=coords), inputs["dout"])
    for name in names:
        gradient = results.pop(f"d{name}")
        results[f"d{name}"] = gradient[::9].clone()
        gradient[::9] = 0.0
        assert not gradient.any(), "no two tokens are at these distances"
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name])


@pytest.mark.parametrize("relative", RELATIVE)
def test_table_in_fp32_beside_fp16(kernels, relative: str) -> None:  # type: ignore[no-untyped-def]
    """As under autocast; gradients keep their dtype. Tables are rounded to the dtype of q."""
    case = AttentionCase((34, 5), head_dim=16, relative=relative)
    inputs = case.inputs(torch.float16)
    a = arguments_of(case, inputs)
    rounded = run(kernels, a, inputs["dout"])
    names = [TABLES[letter] for letter in relative]
    results = run(kernels, a._replace(**{name: getattr(a, name).float() for name in names}), inputs["dout"])
    for name in names:
        assert results[f"d{name}"].dtype == torch.float32
        assert torch.equal(results[f"d{name}"].half(), rounded[f"d{name}"])
    assert torch.equal(results["dq"], rounded["dq"]) and torch.equal(results["dk"], rounded["dk"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_any_strides(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Expanded over heads, as one table of all heads is, and heads that stand first: the same bits as written out."""
    case = AttentionCase((34, 5), num_heads=3, head_dim=16, relative="CP")
    inputs = case.inputs(dtype)
    expanded = inputs["relative_keys"][:, :1].expand(-1, 3, -1)
    moved = inputs["relative_queries"].transpose(0, 1).contiguous().transpose(0, 1)
    written = inputs | {"relative_keys": expanded.clone()}
    expected = check(kernels, case, dtype, written)
    results = run(
        kernels, arguments_of(case, inputs | {"relative_keys": expanded, "relative_queries": moved}), inputs["dout"]
    )
    assert all(torch.equal(results[name], expected[name]) for name in expected if name != "lse")


@pytest.mark.parametrize("num_shares", [1, 2, 5])
def test_gradients_of_tables_in_shares(kernels, monkeypatch: pytest.MonkeyPatch, num_shares: int) -> None:  # type: ignore[no-untyped-def]
    """However many programs sequences are dealt out to, more than there are sequences too."""
    monkeypatch.setattr(kernels, "_num_shares", lambda *given: num_shares)
    check(kernels, AttentionCase((9, 0, 34, 3), head_dim=16, relative="CP", holes=True), torch.float32)


# Order, repetition, nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_repeat_and_the_order_of_sequences_changes_no_bit(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((7, 33, 0, 5), head_dim=16, bias="AQK", relative="CP", dropout_p=0.1)
    inputs = case.inputs(dtype)
    a = arguments_of(case, inputs)
    first = run(kernels, a, inputs["dout"])
    for order in (None, torch.tensor([1, 0, 3, 2], dtype=torch.int32)):
        second = run(kernels, a._replace(sequence_order=order), inputs["dout"])
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lengths", [((), None), ((0, 0), None), ((3, 2), (0, 0)), ((0, 0), (3, 2))], ids=str)
def test_nothing_to_attend_to_or_with(kernels, lengths: Any) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase(*lengths, head_dim=16, bias="A", relative="CP", dropout_p=0.1)
    results = check(kernels, case, torch.float32)
    assert not any(t.any() for name, t in results.items() if name != "lse")


def test_unwanted_gradients_are_not_made(kernels) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((5,), head_dim=16, bias="A", relative="CP")
    inputs = case.inputs(torch.float32)
    a = arguments_of(case, inputs)
    out, lse, mask = kernels.attention_fwd(a)
    every = kernels.attention_bwd(a, inputs["dout"], out, lse, mask, set(EXTRAS))
    for wanted in EXTRAS:
        made = kernels.attention_bwd(a, inputs["dout"], out, lse, mask, {wanted})
        assert made.keys() == {"q", "k", "v", wanted}
        assert all(torch.equal(made[name], every[name]) for name in made)


def test_a_bias_is_read_once_a_pass(kernels) -> None:  # type: ignore[no-untyped-def]
    """Forward, dq, and dk with dv: each reads every pair's bias once, and writes nothing of its size."""
    case = AttentionCase((40,), num_heads=2, head_dim=16, bias="BAQK")
    inputs = case.inputs(torch.float16)
    a = arguments_of(case, inputs)
    # One row of the batch would be broadcast all the same; its other dimensions are full.
    assert inputs["bias"].shape == (1, 2, 40, 40)
    with traffic() as forward:
        out, lse, mask = kernels.attention_fwd(a)
    with traffic() as backward:
        kernels.attention_bwd(a, inputs["dout"], out, lse, mask, set())
    for bias in inputs["bias"][0]:
        # In forward, queries past the end of a tile read the first one's, from the cache.
        assert forward.times_loaded(bias[1:]) == {1} and backward.times_loaded(bias) == {2}
    assert forward.stored_bytes == out.nbytes + lse.nbytes
    assert backward.stored_bytes == 3 * out.nbytes + lse.nbytes  # and delta
