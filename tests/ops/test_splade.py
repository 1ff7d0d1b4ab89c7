"""The op splade: every back-end, autograd's states, autocast, ties, what is not finite, messages."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.splade import splade
from bert_fast.reference.splade import ACTIVATIONS, Splade, splade_fwd
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.splade import chosen_splade, plain_splade
from bert_fast.testing.tolerances import RELATIVE
from tests.wants import parametrize_wants

# Masked lanes, whose results are selected away: NumPy says so, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = ["reference", "torch", TRITON]
OP = "splade"
NAMES = ("x", "weight", "bias")
LENGTHS = [3, 0, 1, 9, 0, 2]
_fwd = torch.ops.bert_fast.splade_fwd.default
_bwd = torch.ops.bert_fast.splade_bwd.default


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def leaves(
    lengths: list[int] = LENGTHS, num_words: int = 70, hidden_size: int = 16, dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, weight, bias, cu_seqlens; about half of the words have a score above 0 in a text."""
    x, weight = torch.randn(sum(lengths), hidden_size), torch.randn(num_words, hidden_size) / hidden_size**0.5
    bias = torch.randn(num_words) - 1
    parameters = (t.to(dtype).to(parameter_dtype or dtype).requires_grad_() for t in (weight, bias))
    return x.to(dtype).requires_grad_(), *parameters, offsets(lengths)


def module_of(name: str) -> Any:
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), name)


def tokens_of(name: str, *inputs: Any, activation: str = "relu") -> Tensor:
    *tensors, cu_seqlens = inputs
    given = [None if t is None else t.detach() for t in tensors]
    return _fwd(*given, cu_seqlens, len(cu_seqlens) - 1, activation, True, name)[1]


def compare(name: str, *inputs: Any, activation: str = "relu") -> None:
    """Values against all tokens', gradients against those of the tokens that were chosen."""
    *tensors, cu_seqlens = inputs
    leaves_ = [t for t in tensors if t is not None]
    doubles = [None if t is None else t.detach().to(tensors[0].dtype).double().requires_grad_() for t in tensors]
    lengths = cu_seqlens.diff().tolist()
    y = splade(*inputs, activation=activation, backend=name)
    plain = plain_splade(*tensors, lengths, activation).to(y.dtype)
    assert y.is_contiguous()
    assert_close_to_truth(OP, "y", y, plain, plain_splade(*doubles, lengths, activation))
    tokens, dy = tokens_of(name, *inputs, activation=activation), torch.randn(y.shape).to(y.dtype)
    assert torch.equal(tokens < 0, y == 0)
    plain = torch.autograd.grad(chosen_splade(*tensors, tokens, activation).to(y.dtype), leaves_, dy)
    exact = torch.autograd.grad(
        chosen_splade(*doubles, tokens, activation), [t for t in doubles if t is not None], dy.double()
    )
    for key, actual, stock, truth in zip(NAMES, torch.autograd.grad(y, leaves_, dy), plain, exact, strict=False):
        assert actual.is_contiguous()
        is_mixed = key != "x" and tensors[0].dtype != tensors[1].dtype
        assert_close_to_truth(OP, f"d{key}_of_half" if is_mixed else f"d{key}", actual, stock, truth)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32),
     (torch.bfloat16, torch.float32)],
)  # fmt: skip
def test_back_ends_agree_with_fp64(
    name: str, has_bias: bool, activation: str, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> None:
    if name == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products in bf16")
    x, weight, bias, cu_seqlens = leaves(dtype=dtype, parameter_dtype=parameter_dtype)
    compare(name, x, weight, bias if has_bias else None, cu_seqlens, activation=activation)


@pytest.mark.parametrize("lengths", [[1], [20, 1, 1], [2] * 9, [0, 17, 0]], ids=lambda lengths: f"{lengths[0]}")
@pytest.mark.parametrize("num_words", [1, 2, 300])
def test_torch_back_end_in_several_chunks(monkeypatch: pytest.MonkeyPatch, num_words: int, lengths: list[int]) -> None:
    """Texts together, alone and in parts; words in pieces; gradients from pairs and from products."""
    module, inputs = module_of("torch"), leaves(lengths, num_words)
    for chunk_bytes, words in ((2**25, 2**15), (5 * num_words * 4, 2**15), (12 * 7, 7), (1, 1)):
        if words == 1 and num_words > 2:
            continue
        monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr(module, "_WORDS", words)
        for elements in (0, 10**9):
            monkeypatch.setattr(module, "_ELEMENTS_PER_PAIR", elements)
            compare("torch", *inputs)
        with torch.no_grad():
            without = splade(*inputs, backend="torch")
        assert torch.equal(without, splade(*inputs, backend="torch"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_back_end_of_other_devices(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    """Chunks of a fixed number of tokens, which texts reach over."""
    module, inputs = module_of("torch"), leaves()
    monkeypatch.setattr(module, "_maxima_of_texts", module._maxima_of_chunks)
    monkeypatch.setattr(module, "_ELEMENTS_PER_PAIR", 10**9)
    for rows in (1, 2, 5, 100):
        monkeypatch.setattr(module, "_OTHER_CHUNK_BYTES", rows * 70 * 4)
        compare("torch", *inputs, activation=activation)
        with torch.no_grad():
            assert torch.equal(splade(*inputs, backend="torch"), splade(*inputs, backend="torch"))
    spoilt = inputs[0].detach().clone()
    spoilt[4], spoilt[7] = torch.nan, torch.inf
    record = Splade(spoilt, inputs[1].detach(), None, inputs[3], len(LENGTHS), activation, True)
    for actual, expected in zip(module.splade_fwd(record), splade_fwd(record), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_chunks_stay_within_their_memory_for_every_vocabulary() -> None:
    module = module_of("torch")
    ends = offsets([512, 3, 0, 700, *[20] * 40, 5000]).tolist()
    for num_words in (1, 1000, 30522, 119547, 250002):
        blocks = list(module._blocks(num_words))
        assert blocks[0].start == 0 and blocks[-1].stop == num_words
        assert all(one.stop == other.start for one, other in itertools.pairwise(blocks))
        width = max(block.stop - block.start for block in blocks)
        chunks = list(module._chunks(ends, width * 4))
        assert all((stop - start) * width * 4 <= module._CPU_CHUNK_BYTES for start, stop, _ in chunks)
        assert [token for start, stop, _ in chunks for token in range(start, stop)] == list(range(ends[-1]))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_layouts(name: str, layout: str) -> None:
    x, weight, bias, cu_seqlens = leaves()
    relaid = []
    for t in (x.detach(), weight.detach()):
        moved = {
            "transposed": t.t().contiguous().t(),
            "expanded": t[:1].expand_as(t),
            "sliced": torch.cat([t, t], dim=1)[:, t.shape[1] :],
        }[layout]
        relaid.append(moved.requires_grad_())
    compare(name, *relaid, bias.detach().repeat_interleave(2)[::2].requires_grad_(), cu_seqlens)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp64(name: str, activation: str) -> None:
    x, weight, bias, cu_seqlens = leaves([2, 0, 3], 9, 3, dtype=torch.float64)
    assert splade(x, weight, bias, cu_seqlens, backend=name).dtype == torch.float64

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return splade(x, weight, bias, cu_seqlens, activation=activation, backend=name)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=["no texts", "one", "three"])
def test_no_tokens(name: str, lengths: list[int]) -> None:
    x, weight, bias, cu_seqlens = leaves(lengths)
    y = splade(x, weight, bias, cu_seqlens, backend=name)
    assert y.shape == (len(lengths), 70) and not y.any()
    y.sum().backward()
    for leaf in (x, weight, bias):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_below_zero_give_zeros_without_a_gradient(name: str) -> None:
    x, weight, _, cu_seqlens = leaves()
    y = splade(x, weight, torch.full((70,), -1e4), cu_seqlens, backend=name)
    assert not y.any()
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None and not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_the_first_of_equal_tokens_gets_the_gradient(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Within a tile or chunk and across them."""
    x, weight, _, cu_seqlens = leaves([150, 3], 5, 4)
    x = x.detach()[:1].expand(153, 4).contiguous().requires_grad_()
    monkeypatch.setattr(module_of("torch"), "_CPU_CHUNK_BYTES", 64 * 5 * 4)
    splade(x, weight.detach().abs(), torch.full((5,), 9.0), cu_seqlens, backend=name).sum().backward()
    assert x.grad is not None and x.grad.any(1).nonzero().flatten().tolist() == [0, 150]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_huge_and_not_finite_scores_come_out_as_of_torch(name: str, activation: str) -> None:
    scores = [1e-30, 1e-10, 1e-7, 1e-3, 0.4999, 0.5, 3.0, 1e5, 1e30, 3e38, -1.0, -1e30, 0.0, -0.0]
    scores += [torch.nan, -torch.nan, torch.inf, -torch.inf]
    weight = torch.tensor(scores)[:, None].requires_grad_()
    for x, lengths in (([1.0], [1]), ([0.25, 0.5], [2]), ([1.0, 0.5, -1.0], [1, 2]), ([0.5] * 70, [70])):
        tokens = torch.tensor(x)[:, None]
        y = splade(tokens, weight, None, offsets(lengths), activation=activation, backend=name)
        plain = plain_splade(tokens, weight, None, lengths, activation)
        torch.testing.assert_close(y, plain, equal_nan=True, rtol=RELATIVE["splade_of_torch"], atol=0.0)
        mine, theirs = (torch.autograd.grad(t, weight, torch.ones_like(t))[0] for t in (y, plain))
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=RELATIVE["splade_of_torch"], atol=0.0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_logarithms_are_right_to_a_few_units_in_the_last_place(name: str, activation: str) -> None:
    scores = torch.cat([torch.linspace(1e-6, 0.75, 200), torch.logspace(-8, 8, 100)])
    exact = scores.double().log1p()
    exact = exact.log1p() if activation == "log1p_relu" else exact
    y = splade(torch.ones(1, 1), scores[:, None], None, offsets([1]), activation=activation, backend=name)
    torch.testing.assert_close(y[0].double(), exact, rtol=4 * torch.finfo(torch.float32).eps, atol=0.0)


@pytest.mark.parametrize("name", BACKENDS)
@parametrize_wants(*NAMES)
def test_only_wanted_gradients_are_made_and_nothing_else_is_saved(name: str, wants: frozenset[str]) -> None:
    *tensors, cu_seqlens = leaves(dtype=torch.float16)
    for key, t in zip(NAMES, tensors, strict=True):
        t.requires_grad_(key in wants)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = splade(*tensors, cu_seqlens, backend=name)
    addresses = {t.data_ptr() for t in (*tensors, cu_seqlens)}
    made = sum(t.nbytes for t in kept if t.data_ptr() not in addresses)
    assert made == (2 * 4 * y.numel() + cu_seqlens.nbytes if wants else 0)  # offsets are copied
    assert y.requires_grad == bool(wants)
    if wants:
        y.sum().backward()
    assert {key for key, t in zip(NAMES, tensors, strict=True) if t.grad is not None} == wants


def test_nothing_is_saved_without_gradients() -> None:
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = splade(*leaves())
    assert not kept and not y.requires_grad


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_repeat_bit_for_bit(name: str) -> None:
    *tensors, cu_seqlens = leaves()
    y = splade(*tensors, cu_seqlens, backend=name)
    dy = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, tensors, dy, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_offsets_may_be_rewritten_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of("torch"), "_ELEMENTS_PER_PAIR", 10**9)  # products, which read them
    *tensors, cu_seqlens = leaves()
    (expected,) = torch.autograd.grad(splade(*tensors, cu_seqlens).sum(), tensors[0])
    y = splade(*tensors, cu_seqlens)
    cu_seqlens.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), tensors[0])[0], expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_second_derivatives_are_refused(name: str) -> None:
    x, *others = leaves()
    (gradient,) = torch.autograd.grad(splade(x, *others, backend=name).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """x is cast, parameters are not: gradients have the dtypes of what they belong to, and y is fp32."""
    *tensors, cu_seqlens = leaves()
    direct = splade(tensors[0].to(dtype), *tensors[1:], cu_seqlens)
    kept: list[Tensor] = []
    with (
        torch.autocast("cpu", dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = splade(*tensors, cu_seqlens)
        gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert y.dtype == torch.float32 and direct.dtype == dtype and torch.equal(y.to(dtype), direct)
    for mine, theirs in zip(gradients, torch.autograd.grad(direct, tensors, torch.ones_like(direct)), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
    assert not any(t.dtype == dtype and t.shape == tensors[1].shape for t in kept)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_weight_used_twice_gets_both_gradients(name: str) -> None:
    """As a word table that is embedding and decoder at once."""
    _, weight, bias, cu_seqlens = leaves()
    ids = torch.arange(sum(LENGTHS))
    y = splade(weight[ids], weight, bias, cu_seqlens, backend=name)
    plain = plain_splade(weight[ids], weight, bias, LENGTHS)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, weight, dy), torch.autograd.grad(plain, weight, dy))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a Tensor, got list"),
        ({"x": torch.zeros(15, 16).long()}, TypeError, "x: expected a floating-point dtype, got int64"),
        ({"weight": torch.zeros(70, 15)}, ValueError, r"weight: expected shape \[V, 16\], got \[70, 15\]"),
        ({"weight": torch.zeros(70, 16).half()}, TypeError, r"weight: expected dtype float32 .*, got float16"),
        ({"weight": torch.zeros(0, 16), "bias": None}, ValueError, "weight: expected at least one row"),
        ({"bias": torch.zeros(16)}, ValueError, r"bias: expected shape \[70\], got \[16\]"),
        ({"cu_seqlens": offsets(LENGTHS).long()}, TypeError, "cu_seqlens: expected dtype int32, got int64"),
        ({"cu_seqlens": torch.zeros(0).int()}, ValueError, "cu_seqlens: expected at least one entry"),
        ({"cu_seqlens": offsets([3, 4])}, ValueError, r"cu_seqlens: expected offsets that rise from 0 to .* \(15\)"),
        ({"cu_seqlens": offsets([18, -3])}, ValueError, "cu_seqlens: expected offsets that rise"),
        ({"activation": "gelu"}, ValueError, "activation: expected one of relu, log1p_relu, got 'gelu'"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    x, weight, bias, cu_seqlens = leaves()
    given = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens}
    with pytest.raises(error, match=message):
        splade(**(given | changed))


def test_direct_calls_are_checked() -> None:
    x, weight, bias, cu_seqlens = (t.detach() for t in leaves())
    with pytest.raises(ValueError, match=r"num_texts: expected 6 \(cu_seqlens\), got 5"):
        _fwd(x, weight, bias, cu_seqlens, 5, "relu", True, "torch")
    with pytest.raises(ValueError, match="activation: expected one of"):
        _fwd(x, weight, bias, cu_seqlens, 6, "tanh", True, "torch")
    y, tokens = _fwd(x, weight, bias, cu_seqlens, 6, "relu", True, "torch")
    with pytest.raises(ValueError, match=r"tokens: expected ids in \[0, 16\), got 101"):
        _bwd(y, y, tokens.fill_(100), x, weight, cu_seqlens, "relu", True, True, True, "torch")
