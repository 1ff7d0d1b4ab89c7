"""SPLADE's vectors: gradcheck, against torch, ties, texts without tokens, what is not wanted."""

import pytest
import torch
from torch import Tensor

from bert_fast.reference.splade import ACTIVATIONS, Splade, splade_bwd, splade_fwd
from bert_fast.testing.explicit import explicit_function
from bert_fast.testing.splade import plain_splade
from tests.wants import parametrize_wants

LENGTHS = [2, 0, 3, 1, 0]
CU_SEQLENS = torch.tensor([0, 2, 2, 5, 6, 6], dtype=torch.int32)


def _inputs() -> list[Tensor]:
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (7, 3), (7,))]


def _record(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "relu") -> Splade:
    return Splade(x, weight, bias, CU_SEQLENS, len(LENGTHS), activation, True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_explicit_gradients(has_bias: bool, activation: str) -> None:
    def forward(x, weight, bias):
        y, tokens = splade_fwd(_record(x, weight, bias, activation))
        return (y,), (x.detach(), weight.detach(), y.detach(), tokens)

    def backward(saved, dy):
        x, weight, y, tokens = saved
        wants = {"x", "weight", "bias"} if has_bias else {"x", "weight"}
        made = splade_bwd(_record(x, weight, None, activation), dy, y, tokens, wants)
        return made["x"], made["weight"], made.get("bias")

    x, weight, bias = _inputs()
    inputs = x, weight, bias if has_bias else None
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)
    y, tokens = splade_fwd(_record(*inputs, activation))
    torch.testing.assert_close(y, plain_splade(*inputs, LENGTHS, activation))
    assert tokens is not None and tokens.dtype == torch.int32 and torch.equal(tokens < 0, y == 0)
    for text, (start, end) in enumerate(zip(CU_SEQLENS.tolist(), CU_SEQLENS.tolist()[1:], strict=False)):
        chosen = tokens[text][tokens[text] >= 0]
        assert ((chosen >= start) & (chosen < end)).all()


def test_of_equal_scores_the_first_token_counts_and_nan_above_all() -> None:
    x = torch.tensor([[1.0], [2.0], [2.0], [3.0], [torch.nan], [torch.nan]])
    y, tokens = splade_fwd(Splade(x, torch.ones(1, 1), None, CU_SEQLENS.new_tensor([0, 3, 6]), 2, "relu", True))
    assert tokens is not None and tokens.tolist() == [[1], [4]] and y.isnan().tolist() == [[False], [True]]


@parametrize_wants("x", "weight", "bias")
def test_only_what_is_wanted_is_made(wants: frozenset[str]) -> None:
    a = _record(*_inputs())
    y, tokens = splade_fwd(a)
    assert tokens is not None
    assert splade_bwd(a, torch.randn_like(y), y, tokens, wants).keys() == wants
    assert splade_fwd(a._replace(wants_tokens=False))[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """y is fp32; gradients have the dtypes of x and weight, whichever these are."""
    x, weight, bias = (t.detach().to(dtype) for t in _inputs())
    a = _record(x, weight.float(), bias.float())
    y, tokens = splade_fwd(a)
    assert y.dtype == torch.float32 and tokens is not None
    torch.testing.assert_close(y, plain_splade(x.float(), weight.float(), bias.float(), LENGTHS))
    for wide in (dtype, torch.float32):
        made = splade_bwd(a._replace(weight=weight.to(wide)), y, y, tokens, {"x", "weight", "bias"})
        assert {name: g.dtype for name, g in made.items()} == dict(x=dtype, weight=wide, bias=wide)
