"""rotary: gradcheck, transformers' functions, and what a turn leaves as it is."""

import pytest
import torch
from torch import Tensor

from bert_fast.reference.rotary import Rotary, rotary_bwd, rotary_fwd, rotary_in_place
from bert_fast.testing.explicit import explicit_function


def angles(tokens: int, head_dim: int) -> Tensor:
    return 3.0 * torch.randn(tokens, head_dim // 2, dtype=torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 2, 6), (5, 1, 2, 2), (1, 3, 1, 30)])
def test_gradcheck(shape: tuple[int, ...], interleaved: bool) -> None:
    angle = angles(shape[0], shape[-1])

    def forward(qkv: Tensor) -> tuple[tuple[Tensor, ...], Rotary]:
        a = Rotary(qkv, angle.cos(), angle.sin(), interleaved)
        return (rotary_fwd(a),), a._replace(qkv=None)  # type: ignore[arg-type]  # backward does not read it

    def backward(a: Rotary, dy: Tensor) -> tuple[Tensor]:
        return (rotary_bwd(a, dy)["qkv"],)

    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (qkv,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_alone(interleaved: bool) -> None:
    """Of one query and one key at all positions: what the paper asks of the embedding."""
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 6, 1, 1, 8).unbind()
    angle = torch.arange(6.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).double()
    turned = [rotary_fwd(Rotary(t, angle.cos(), angle.sin(), interleaved)).flatten(1) for t in (q, k)]
    scores = turned[0] @ turned[1].T
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_round_once_and_value_stays(dtype: torch.dtype) -> None:
    qkv, dy = torch.randn(2, 4, 3, 2, 6).to(dtype).unbind()
    angle = angles(4, 6).float()
    a = Rotary(qkv, angle.cos(), angle.sin(), False)
    assert torch.equal(rotary_fwd(a), rotary_fwd(a._replace(qkv=qkv.float())).to(dtype))
    assert torch.equal(rotary_fwd(a)[:, 2], qkv[:, 2]) and torch.equal(rotary_bwd(a, dy)["qkv"][:, 2], dy[:, 2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_forth_and_back(interleaved: bool) -> None:
    qkv, angle = torch.randn(5, 3, 2, 6, dtype=torch.float64), angles(5, 6)
    a = Rotary(qkv.clone(), angle.cos(), angle.sin(), interleaved)
    expected = rotary_fwd(a)
    rotary_in_place(a, False)
    assert torch.equal(a.qkv, expected)
    rotary_in_place(a, True)
    torch.testing.assert_close(a.qkv, qkv)
