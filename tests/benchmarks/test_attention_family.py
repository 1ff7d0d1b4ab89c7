"""Attention's cases: lengths as they claim to be, a check that finds wrong results, contestants that agree."""

from typing import Any

import pytest
import torch

from benchmarks.families import attention as family
from bert_fast import ops
from tests.reference.test_dropout import Calls

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", family.QUANTILES)
@pytest.mark.parametrize("num_tokens", [1000, 16384, 32768])
def test_mixed_lengths(text: str, num_tokens: int) -> None:
    lengths = family.mixed_lengths(text, num_tokens)
    assert sum(lengths) == num_tokens and min(lengths) >= 1
    assert lengths == family.mixed_lengths(text, num_tokens)
    assert lengths != sorted(lengths), "as they come, not sorted"
    if num_tokens >= 16384:
        ordered = sorted(lengths)
        for share, length in family.QUANTILES[text][1:-2]:
            assert abs(ordered[int(share * len(ordered))] - length) <= 0.06 * length + 1


def problem(dropout_p: float, lengths: tuple[int, ...] = (7, 33)) -> Any:
    torch.manual_seed(0)
    return family.make(lengths, 2, 16, torch.float32, dropout_p, CPU)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_right_result_is_green(dropout_p: float) -> None:
    problem(dropout_p).verify()


@pytest.mark.parametrize(
    ("dropout_p", "change"),
    [(0.3, {"site": 8}), (0.3, {"dropout_p": 0.0}), (0.0, {"softmax_scale": 0.2501}), (0.0, {"causal": True})],
)
def test_a_wrong_result_is_red(dropout_p: float, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: attention(*args, **(kwargs | change)))
    with pytest.raises(AssertionError, match=r"attention\.out"):
        problem(dropout_p).verify()


def test_a_wrong_gradient_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ops.attention
    monkeypatch.setattr(
        ops, "attention", lambda q, k, v, **kwargs: attention(q, k.detach() + 0.999 * (k - k.detach()), v, **kwargs)
    )
    with pytest.raises(AssertionError, match=r"attention\.dk"):
        problem(0.0).verify()


def test_the_padded_contestant_computes_the_same() -> None:
    """On one padded batch, packed for bert_fast."""
    lengths = (7, 33)
    made = problem(0.0, lengths)
    padded, _ = made.own_inputs["eager"]
    packed = tuple(torch.cat([t[i, :n] for i, n in enumerate(lengths)]) for t in padded)
    theirs = made.eager(*padded)
    torch.testing.assert_close(made.fast(*packed), torch.cat([theirs[i, :n] for i, n in enumerate(lengths)]))


def test_without_padding_all_share_their_inputs() -> None:
    made = problem(0.0, (16, 16))
    assert not made.own_inputs
    torch.testing.assert_close(made.fast(*made.inputs), made.eager(*made.inputs))


def test_figures_of_a_case() -> None:
    made = problem(0.1, (16, 8))
    element = 24 * 2 * 16
    assert made.bytes_moved == {"fwd": 4 * 4 * element + 24 * (8 + 8), "bwd": 8 * 4 * element + 24 * (8 + 8)}
    products = (16**2 + 8**2) * 2 * 16
    assert made.flops == {"fwd": 4 * products, "bwd": 10 * products}


def test_a_mask_is_made_once_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators are most of what `verify` launches: 128 sequences of 12 heads took 750,000 of them."""
    made: list[int] = []
    make = family.attention_keep_mask
    monkeypatch.setattr(family, "attention_keep_mask", lambda *given: made.append(1) or make(*given))
    problem(0.3, (7, 33, 5)).verify()
    assert len(made) == 3


def test_the_operators_of_a_full_case() -> None:
    lengths, heads, meta = (128,) * 128, 12, torch.device("meta")
    tokens = sum(lengths)
    *inputs, upstream = (torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device=meta) for _ in range(4))
    coords = torch.empty(tokens, 2, dtype=torch.int32, device=meta)
    seed = torch.empty(1, dtype=torch.int64, device=meta)
    with Calls() as calls:
        family._explicit(tuple(inputs), upstream, lengths, coords, seed, 0.1, (torch.bfloat16, torch.float64))
    assert calls.count < 400 * len(lengths)
