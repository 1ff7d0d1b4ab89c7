"""Relative positions in the native attention, per instruction set: blocks of every size, holes, strides, bits."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from bert_fast.reference.attention import Attention
from bert_fast.testing.attention import TABLES, AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import attention as torch_attention
from bert_fast.torch.attention import attention_bwd, attention_fwd
from tests.attention_records import plain_attention

# Rows are worked on 96 at a time, these 24 and 16 at a time; head sizes with whole vectors and without.
CASES = [
    dict(lengths=(0, 1, 23), head_dim=8, relative="CP"),
    dict(lengths=(24, 25), head_dim=64, relative="C"),
    dict(lengths=(24, 25), head_dim=64, relative="P", causal=True),
    dict(lengths=(95, 97), head_dim=24, relative="CP", causal=True, dropout_p=0.1),
    dict(lengths=(130, 17), head_dim=80, relative="CP", bias="BAQK"),
    dict(lengths=(300,), head_dim=64, relative="CP", dropout_p=0.1),
    dict(lengths=(97, 30, 1), head_dim=64, relative="CP", holes=True),
    dict(lengths=(97, 30, 1), head_dim=24, relative="C", holes=True, causal=True, bias="AQ", dropout_p=0.1),
    dict(lengths=(30, 97), head_dim=80, relative="P", holes=True, order=(1, 0)),
    dict(lengths=(40, 5, 0, 3), lengths_k=(7, 100, 4, 0), head_dim=24, relative="CP"),
    dict(lengths=(3, 1), lengths_k=(100, 20), head_dim=64, relative="CP", cached=True, causal=True),
]


@pytest.fixture(autouse=True)
def _is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_attention, "RelativePositions")  # what tensor arithmetic would need


def record(lengths: list[int], head_dim: int = 64, start: int = 0) -> tuple[Attention, Tensor]:
    """Self-attention of three heads with both tables, and a gradient of its output; positions count from `start`."""
    generator = torch.Generator().manual_seed(2)

    def normal(size: int) -> Tensor:
        return torch.randn(size, 3, head_dim, generator=generator)

    q, k, v, dout = (normal(sum(lengths)) for _ in range(4))
    names = [(row, start + column) for row, length in enumerate(lengths) for column in range(length)]
    coords = torch.tensor(names, dtype=torch.int32)
    a = plain_attention(
        q, k, v, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), coords_q=coords, coords_k=coords,
        **{name: normal(2 * max(lengths) - 1) for name in TABLES.values()},
    )  # fmt: skip
    return a, dout


def run(a: Attention, dout: Tensor, wants: frozenset[str] = frozenset(TABLES.values())) -> dict[str, Tensor]:
    out, lse, mask = attention_fwd(a)
    return {"out": out, "lse": lse, **attention_bwd(a, dout, out, lse, mask, wants)}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("arguments", CASES, ids=lambda given: ", ".join(map(str, given.values())))
def test_against_the_reference(native: ModuleType, arguments: dict) -> None:
    case, dtype = AttentionCase(**arguments), torch.float32
    actual, plain, truth = case.run("torch", dtype), case.plain(dtype), case.truth(dtype)
    assert actual.keys() == plain.keys() == truth.keys()
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


def test_bits_do_not_depend_on_threads(native: ModuleType) -> None:
    a, dout = record([90, 128, 30, 64, 64, 64])
    one = run(a, dout)
    torch.set_num_threads(2)  # the fixture puts it back
    assert_same_bits(run(a, dout), one)


def test_only_distances_count(native: ModuleType) -> None:
    """As behind padding on the left: positions from 5 on, and tables that end with the distances that occur."""
    assert_same_bits(run(*record([30, 97], start=5)), run(*record([30, 97])))


@pytest.mark.parametrize("name", TABLES.values())
def test_one_gradient_has_the_bits_of_both(native: ModuleType, name: str) -> None:
    a, dout = record([100, 31])
    both, one = run(a, dout), run(a, dout, frozenset({name}))
    assert one.keys() == {"out", "lse", "q", "k", "v", name}
    assert_same_bits(one, both)
    assert_same_bits(run(a, dout, frozenset()), {name: both[name] for name in ("out", "lse", "q", "k", "v")})


def test_gradients_of_bias_and_tables_at_once(native: ModuleType) -> None:
    a, dout = record([100, 31])
    a = a._replace(bias=torch.randn(1, 1, 100, 100))  # one gradient for all heads, while a table's is of each
    tables = frozenset(TABLES.values())
    both = run(a, dout, tables | {"bias"})
    assert_same_bits(run(a, dout, tables), both)
    assert_same_bits(run(a, dout, frozenset({"bias"})), both)


def test_any_strides_of_tables(native: ModuleType) -> None:
    """One table expanded over heads, every other row of a larger one, and elements that do not stand together."""
    a, dout = record([40, 7])
    assert a.relative_keys is not None and a.relative_queries is not None
    one = a.relative_keys[:, :1].clone()
    apart = a.relative_queries.repeat_interleave(2, 0)[::2]
    turned = a.relative_queries.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not one.expand(-1, 3, -1).is_contiguous() and not apart.is_contiguous() and turned.stride(2) != 1
    expected = run(a._replace(relative_keys=one.repeat(1, 3, 1)), dout)
    for strided in (apart, turned):
        assert_same_bits(run(a._replace(relative_keys=one.expand(-1, 3, -1), relative_queries=strided), dout), expected)


def test_rows_of_tables_that_no_distance_reaches_get_no_gradient(native: ModuleType) -> None:
    a, dout = record([9, 4])
    wider = {
        name: torch.nn.functional.pad(getattr(a, name), (0, 0, 0, 0, 6, 6), value=torch.nan) for name in TABLES.values()
    }
    expected, actual = run(a, dout), run(a._replace(**wider), dout)
    for name in TABLES.values():
        assert torch.equal(actual[name][6:-6], expected[name])
        assert not actual[name][:6].any() and not actual[name][-6:].any()


def test_distances_beyond_the_tables_are_refused(native: ModuleType) -> None:
    a, dout = record([9, 4])
    assert a.relative_keys is not None and a.relative_queries is not None
    short = a._replace(relative_keys=a.relative_keys[1:-1], relative_queries=a.relative_queries[1:-1])
    with pytest.raises(ValueError, match=r"at most 7 positions apart .* got 8"):
        attention_fwd(short)
    out, lse, mask = attention_fwd(a)
    with pytest.raises(ValueError, match=r"at most 7 positions apart .* got 8"):
        attention_bwd(short, dout, out, lse, mask, frozenset())
    with pytest.raises(ValueError, match="relative positions need the position of every token"):
        attention_fwd(a._replace(coords_k=None))
