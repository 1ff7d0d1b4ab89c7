"""The Triton kernels of splade, in the interpreter, against the fp64 reference: texts across tiles and groups."""

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import splade as reference
from bert_fast.reference.splade import ACTIVATIONS, Splade
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.splade import chosen_splade, plain_splade
from bert_fast.testing.traffic import assert_traffic, traffic
from tests.wants import parametrize_wants

pytestmark = [
    pytest.mark.interpreter,
    # Logarithms of what is selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

OP = "splade"
NAMES = ("x", "weight", "bias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make(
    lengths: list[int], num_words: int, hidden_size: int = 24, dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None, activation: str = "relu",
) -> Splade:  # fmt: skip
    x, weight = torch.randn(sum(lengths), hidden_size), torch.randn(num_words, hidden_size) / hidden_size**0.5
    bias, ends = torch.randn(num_words) - 1, torch.tensor([0, *lengths]).cumsum(0).int()
    weight, bias = (t.to(dtype).to(parameter_dtype or dtype) for t in (weight, bias))
    return Splade(x.to(dtype), weight, bias, ends, len(lengths), activation, True)


def check(kernels, a: Splade) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Compares both passes; returns y and tokens."""
    lengths = a.cu_seqlens.diff().tolist()
    tensors = [t for t in (a.x, a.weight, a.bias) if t is not None]
    leaves = [t.clone().requires_grad_() for t in tensors]
    doubles = [t.to(a.x.dtype).double().requires_grad_() for t in tensors]
    of_leaves, of_doubles = ([*some, None][:3] for some in (leaves, doubles))
    y, tokens = kernels.splade_fwd(a)
    plain, exact = (plain_splade(*given, lengths, a.activation) for given in (of_leaves, of_doubles))
    assert_close_to_truth(OP, "y", y, plain, exact)
    assert torch.equal(tokens < 0, y == 0)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for text, row in enumerate(tokens):
        assert (owners[row[row >= 0].long()] == text).all()
    dy = torch.randn_like(y)
    made = kernels.splade_bwd(a._replace(bias=None), dy, y, tokens, set(NAMES[: len(tensors)]))
    plain = torch.autograd.grad(chosen_splade(*of_leaves, tokens, a.activation), leaves, dy)
    exact = torch.autograd.grad(chosen_splade(*of_doubles, tokens, a.activation), doubles, dy.double())
    for name, stock, truth in zip(NAMES, plain, exact, strict=False):
        is_mixed = name != "x" and a.x.dtype != a.weight.dtype
        assert_close_to_truth(OP, f"d{name}_of_half" if is_mixed else f"d{name}", made[name], stock, truth)
    return y, tokens


LENGTHS = {
    "one token": [1],
    "a tile": [64],
    "texts of a tile": [3, 0, 17, 40, 1, 3],
    "texts across tiles": [63, 2, 64, 65, 0, 1, 127],
    "texts across groups": [250, 12, 300, 0, 0, 5],
    "a text of many groups": [0, 600, 0],
    "none at the ends": [0, 0, 9, 0, 0],
    "a whole group, then none": [256, 0, 256],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("num_words", [1, 127, 130])
def test_texts_across_tiles_and_groups(kernels, lengths: list[int], num_words: int) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make(lengths, num_words))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden_size", [1, 31, 64, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widths_and_activations(kernels, hidden_size: int, has_bias: bool, activation: str) -> None:  # type: ignore[no-untyped-def]
    a = make([5, 70, 2], 37, hidden_size, activation=activation)
    check(kernels, a if has_bias else a._replace(bias=None))


@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.float32)],
)
def test_dtypes(kernels, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make([5, 70, 2], 37, 40, dtype, parameter_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Texts of one tile, so that nothing of theirs is read again; what a block of words reads twice is cached."""
    a = make([5, 40, 0, 2], 70, 40, dtype)
    with traffic() as forward:
        y, tokens = kernels.splade_fwd(a)
    ends, e = a.cu_seqlens, dtype.itemsize
    floor = a.x.nbytes + a.weight.nbytes + a.bias.nbytes + ends.nbytes + y.nbytes + tokens.nbytes
    assert_traffic(forward, floor, cached=[a.x, a.weight, a.bias, ends])
    assert forward.times_stored(y) == forward.times_stored(tokens) == {1}
    dy, pairs = torch.randn_like(y), int((tokens >= 0).sum())
    with traffic() as dx:
        made = kernels.splade_bwd(a, dy, y, tokens, {"x"})
    of_texts = tokens[ends.diff() > 0].nbytes + 8 * pairs  # nothing is read of a text without tokens
    floor = of_texts + a.weight.nbytes + ends.nbytes + made["x"].nbytes
    assert_traffic(dx, floor, cached=[a.weight, ends, dy, y, tokens])
    assert dx.times_stored(made["x"]) == {1}
    with traffic() as others:
        made = kernels.splade_bwd(a, dy, y, tokens, {"weight", "bias"})
    floor = tokens.nbytes + 8 * pairs + pairs * a.x.shape[1] * e + made["weight"].nbytes + made["bias"].nbytes
    assert_traffic(others, floor)


def test_two_runs_repeat_each_other_bit_for_bit(kernels) -> None:  # type: ignore[no-untyped-def]
    a = make([5, 70, 2], 37)
    runs = []
    for _ in range(2):
        y, tokens = kernels.splade_fwd(a)
        runs.append([y, tokens, *kernels.splade_bwd(a, y, y, tokens, {*NAMES}).values()])
    assert all(map(torch.equal, *runs))


def test_rows_that_lie_apart_and_transposed(kernels) -> None:  # type: ignore[no-untyped-def]
    a = make([5, 70, 2], 37)
    apart = torch.cat([a.x, a.x], 1)[:, : a.x.shape[1]]
    check(kernels, a._replace(x=apart, weight=a.weight.t().contiguous().t(), bias=a.bias.repeat_interleave(2)[::2]))


def test_ties_go_to_the_first_token_of_all_tiles(kernels) -> None:  # type: ignore[no-untyped-def]
    a = make([2, 200, 100], 9)
    a = a._replace(x=a.x[:1].expand(302, -1).contiguous(), bias=torch.full((9,), 20.0))
    _, tokens = check(kernels, a)
    assert tokens.tolist() == [[0] * 9, [2] * 9, [202] * 9]


def test_scores_that_are_not_finite_in_any_tile(kernels) -> None:  # type: ignore[no-untyped-def]
    """NaN of either sign wins over infinity, and the first of several."""
    for place in (0, 70, 199):
        a = make([200, 3], 9)
        a.x[place] = torch.nan
        a.x[(place + 90) % 200] = torch.inf
        a.x[(place + 91) % 200, 0] = -torch.nan
        y, tokens = kernels.splade_fwd(a)
        expected, of_reference = reference.splade_fwd(a)
        torch.testing.assert_close(y, expected, equal_nan=True)
        assert y[0].isnan().all() and y[1].isfinite().all() and torch.equal(tokens, of_reference)


@parametrize_wants(*NAMES)
def test_only_what_is_wanted_is_made(kernels, wants: frozenset[str]) -> None:  # type: ignore[no-untyped-def]
    a = make([5, 20], 37)
    y, tokens = kernels.splade_fwd(a)
    everything = kernels.splade_bwd(a, y, y, tokens, {*NAMES})
    made = kernels.splade_bwd(a, y, y, tokens, wants)
    assert made.keys() == wants and all(torch.equal(made[name], everything[name]) for name in wants)
    without, none = kernels.splade_fwd(a._replace(wants_tokens=False))
    assert none is None and torch.equal(without, y)
