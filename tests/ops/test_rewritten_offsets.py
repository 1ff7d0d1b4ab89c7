"""Backward attends within the sequences that forward checked, whatever a loader writes into its buffers meanwhile."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_fast import native, ops

OTHERS = {"shorter": [0, 3, 10], "past the end": [0, 4, 100_000], "negative": [0, -5, 10], "not from 0": [7, 8, 10]}


def gradients(op: str, back_end: str, buffer: np.ndarray, rewritten: list[int] | None) -> tuple[Tensor, ...]:
    """Of an op whose offsets lie in buffer, which holds something else before backward."""
    torch.manual_seed(1)
    offsets, layout = torch.from_numpy(buffer), dict(dropout_p=0.2, seed=torch.tensor([3]), backend=back_end)
    index = torch.arange(10, dtype=torch.int32)
    coords = torch.stack((torch.zeros_like(index), index), 1)
    qkv = torch.randn(10, 3, 2, 8, requires_grad=True)
    if op == "attention":
        out = ops.attention(*qkv.unbind(1), cu_seqlens_q=offsets, max_seqlen_q=6, coords_q=coords, **layout)
    else:
        out = ops.attention_qkv(qkv, cu_seqlens=offsets, max_seqlen=6, coords=coords, **layout)
    dout = torch.randn_like(out)
    if rewritten is not None:
        buffer[:] = rewritten
    return torch.autograd.grad(out, qkv, dout)


@pytest.mark.parametrize("rewritten", OTHERS)
@pytest.mark.parametrize("back_end", ["torch", "reference"])
@pytest.mark.parametrize("op", ["attention", "attention_qkv"])
def test_backward_uses_what_forward_checked(op: str, back_end: str, rewritten: str) -> None:
    good = np.array([0, 4, 10], dtype=np.int32)
    expected = gradients(op, back_end, good.copy(), None)
    assert torch.equal(gradients(op, back_end, good, OTHERS[rewritten])[0], expected[0])


def native_call(**changes: int) -> tuple[Tensor, Tensor]:
    """The C++ forward itself, on 10 tokens with 2 heads; returns out and lse as it leaves them."""
    library = native.load()
    if library is None:
        pytest.skip(str(native.unavailable_reason()))
    x, out, lse = torch.randn(10, 2, 8), torch.full((10, 2, 8), 7.0), torch.full((2, 10), 7.0)
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    arguments = dict(
        q=x.data_ptr(), k=x.data_ptr(), v=x.data_ptr(), q_stride=16, k_stride=16, v_stride=16, out=out.data_ptr(),
        lse=lse.data_ptr(), cu_q=offsets.data_ptr(), cu_k=offsets.data_ptr(), num_sequences=2, num_q_tokens=10,
        num_k_tokens=10, num_heads=2, head_dim=8, softmax_scale=1.0, coords_q=0, coords_k=0, seed=0, site=0,
        threshold=0, scale=1.0, causal=False, lse_stride=10, num_threads=1,
    )  # fmt: skip
    with pytest.raises(ValueError) as refusal:
        library.attention_fwd(**arguments | changes)
    name = {"cu_q": "cu_seqlens_q"}.get(next(iter(changes)), next(iter(changes)))
    assert name in str(refusal.value) or "offsets" in str(refusal.value)
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {"num_q_tokens": 9}, {"num_k_tokens": 9}, {"num_k_tokens": 11}, {"num_sequences": 1}, {"num_sequences": -1},
        {"num_heads": 0}, {"head_dim": 257}, {"lse_stride": 9}, {"q": 0}, {"k": 0}, {"v": 0}, {"out": 0}, {"lse": 0},
        {"cu_q": 0}, {"coords_q": 0, "causal": True},
    ],
    ids=lambda changes: "-".join(f"{name} {value}" for name, value in changes.items()),
)  # fmt: skip
def test_the_routine_refuses_what_does_not_fit(changes: dict[str, int]) -> None:
    out, lse = native_call(**changes)
    assert (out == 7.0).all() and (lse == 7.0).all()
