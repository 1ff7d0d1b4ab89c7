"""Dropout's mask as forward stores it for backward, in the interpreter: the same bits as drawn in every kernel."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bert_fast import BertConfig, BertModel, backend, ops, use_backend
from bert_fast.batch_invariance import batch_invariant
from bert_fast.ops.packing import Packing
from bert_fast.reference.attention import Attention, AttentionQkv, stored_mask_shape
from bert_fast.reference.dropout import attention_keep_mask
from bert_fast.testing.attention import SEED, SITE, AttentionCase
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.triton._launch import assume_architecture

from .attention_grid import OP, arguments_of, check, run

pytestmark = pytest.mark.interpreter

# Odd lengths, one token, none, and what begins a new strip of 16 queries, a tile and a group of 64 keys.
LENGTHS = (129, 0, 1, 17, 64, 200, 16, 15)
CASES = {
    "self": AttentionCase(LENGTHS, None, 2, 16, dropout_p=0.3),
    "causal": AttentionCase(LENGTHS, None, 2, 16, dropout_p=0.3, causal=True),
    "causal holes": AttentionCase(LENGTHS, None, 1, 16, dropout_p=0.3, causal=True, holes=True),
    "fewer keys": AttentionCase((140, 5, 70, 0, 3), (3, 150, 0, 9, 65), 2, 16, dropout_p=0.3),
    "wide heads": AttentionCase((129, 70), None, 1, 128, dropout_p=0.3),
    "wide heads causal": AttentionCase((129, 70), None, 1, 128, dropout_p=0.3, causal=True),
}


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def bits_of(mask: Tensor, a: Attention) -> list[Tensor]:
    """bool [A, Sq, Sk] of every sequence: the words of a stored mask, taken apart as the kernels' docstrings say."""
    found = []
    bounds_q, bounds_k = a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(bounds_q)):
        num_queries, num_keys = end - start, bounds_k[number + 1] - bounds_k[number]
        query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        strip = start // 16 + number + query // 16
        word = key // 64 * 32 + query % 8 * 4 + key % 8 // 2
        bit = key % 2 * 16 + key % 64 // 32 * 8 + query % 16 // 8 * 4 + key % 32 // 8
        found.append((mask.long()[:, strip, word] >> bit & 1).bool())
    return found


def expected_of(a: Attention) -> list[Tensor]:
    """The same by the reference."""
    assert a.seed is not None and a.coords_q is not None
    masks = []
    bounds_k = a.cu_seqlens_k.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(a.cu_seqlens_q.tolist())):
        num_keys = bounds_k[number + 1] - bounds_k[number]
        coords = a.coords_q[start:end]
        if num_keys:
            masks.append(attention_keep_mask(a.seed, a.site, coords, num_keys, a.q.shape[1], a.dropout_p))
        else:
            masks.append(torch.zeros(a.q.shape[1], end - start, 0, dtype=torch.bool))
    return masks


@pytest.mark.parametrize("p", [2 / 65536, 0.1, 31744 / 65536])
def test_forward_stores_the_bits_of_the_reference(kernels: Any, p: float) -> None:
    for case in (CASES["self"], CASES["fewer keys"]):
        a = arguments_of(case, case.inputs(torch.float16))._replace(dropout_p=p)
        mask = kernels.attention_fwd(a)[2]
        assert mask.shape == stored_mask_shape(a)
        for found, expected in zip(bits_of(mask, a), expected_of(a), strict=True):
            assert torch.equal(found, expected)


def test_every_sixteen_bit_value_is_compared_as_the_reference_does(kernels: Any) -> None:
    case = AttentionCase((513,), None, 1, 16, dropout_p=0.5)  # of as many values some are each threshold
    a = arguments_of(case, case.inputs(torch.float16))
    for threshold in (2, 3, 0x3FF, 0x400, 0x401, 0x7BFF, 0x7C00):
        a = a._replace(dropout_p=threshold / 65536)
        (found,), (expected,) = bits_of(kernels.attention_fwd(a)[2], a), expected_of(a)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_backward_has_the_bits_of_a_mask_drawn_again(kernels: Any, name: str) -> None:
    inputs = CASES[name].inputs(torch.float16)
    a = arguments_of(CASES[name], inputs)
    out, lse, mask = kernels.attention_fwd(a)
    drawn = run(kernels, a._replace(keeps=False), inputs["dout"])
    assert mask is not None
    assert torch.equal(out, drawn["out"]) and torch.equal(lse, drawn["lse"])
    made = kernels.attention_bwd(a, inputs["dout"], out, lse, mask, set())
    # dq of narrow heads is added up by other tiles.
    same = "kv" if CASES[name].head_dim <= 64 else "qkv"
    assert all(torch.equal(made[one], drawn[f"d{one}"]) for one in same)
    # What backward reads is the mask itself: of another one gradients differ.
    other = kernels.attention_bwd(a, inputs["dout"], out, lse, ~mask, set())
    assert all((other[one] - made[one]).abs().max() > 0.05 for one in "qkv")


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_the_reference(kernels: Any, name: str) -> None:
    check(kernels, CASES[name], torch.float16)


def test_what_stores_no_mask(kernels: Any) -> None:
    case = AttentionCase((140,), None, 1, 16, dropout_p=0.1)
    a = arguments_of(case, case.inputs(torch.float16))
    assert kernels.stores_mask(a)
    others = {
        "nothing is dropped": {"dropout_p": 0.0},
        "thresholds": {"dropout_p": 1 / 65536},
        "half and more": {"dropout_p": 0.5},
        "whole heads": {"max_seqlen_q": 128, "max_seqlen_k": 128},
        "long": {"max_seqlen_q": 2049, "max_seqlen_k": 2049},
        "long queries": {"max_seqlen_q": 2049},
        "fp32": {"q": a.q.float()},
        "bias": {"bias": torch.zeros(1, 1, 140, 140)},
    }
    for changes in others.values():
        assert not kernels.stores_mask(a._replace(**changes)), changes
    assert kernels.stores_mask(a._replace(max_seqlen_q=2048, max_seqlen_k=129))
    with batch_invariant():
        assert not kernels.stores_mask(a)
    for architecture in ("sm_80", "sm_86", "sm_100", "gfx942"):
        with assume_architecture(architecture):
            assert not kernels.stores_mask(a)
    assert kernels.attention_fwd(a._replace(keeps=False))[2] is None


@pytest.mark.parametrize("max_seqlen", [200, 2049])
def test_a_bound_above_the_lengths_changes_no_mask(kernels: Any, max_seqlen: int) -> None:
    case = AttentionCase((140, 3), None, 1, 16, dropout_p=0.25)
    inputs = case.inputs(torch.float16)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    a = arguments_of(case, inputs)._replace(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
    results = run(kernels, a, inputs["dout"])
    assert all(torch.equal(results[name], expected[name]) for name in ("out", "lse", "dk", "dv"))
    assert max_seqlen > 2048 or torch.equal(results["dq"], expected["dq"])


def test_autograd_saves_a_mask_where_a_gradient_is_recorded(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = torch.randn(150, 3, 2, 16, dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 150], dtype=torch.int32)
    given = {"cu_seqlens": cu_seqlens, "max_seqlen": 150, "seed": SEED, "site": SITE, "backend": "triton"}
    given["coords"] = Packing.from_cu_seqlens(cu_seqlens, 150, 150).coords

    forward, masks = kernels.attention_fwd, []

    def seen(a: Attention) -> Any:
        made = forward(a)
        masks.append(made[2])
        return made

    monkeypatch.setattr(kernels, "attention_fwd", seen)

    def saved(dropout_p: float, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(t), t)[1], lambda t: t):
            ops.attention_qkv(x, **given | {"dropout_p": dropout_p, "seed": SEED if dropout_p else None})
        return [one for one in found if one.dim() == 3 and one.dtype == torch.int32]

    (mask,) = saved(0.1, qkv.clone().requires_grad_())
    assert mask.shape == (2, 150 // 16 + 1, 96) and mask is masks.pop()
    assert not saved(0.0, qkv.clone().requires_grad_()) and not saved(0.1, qkv)
    with torch.no_grad():
        assert not saved(0.1, qkv.clone().requires_grad_())
    assert masks == [None, None, None]


def test_the_registered_ops_know_the_shape_of_a_mask() -> None:
    """Fake tensors have it, and backward refuses another."""
    qkv, cu_seqlens = torch.randn(150, 3, 2, 16, dtype=torch.float16), torch.tensor([0, 150], dtype=torch.int32)
    coords = Packing.from_cu_seqlens(cu_seqlens, 150, 150).coords
    for keeps in (True, False):
        a = AttentionQkv(qkv, cu_seqlens, 150, 0.25, 0.1, SEED, coords, SITE, False, None, None, None, None, keeps)
        made = torch.ops.bert_fast.attention_qkv_fwd(*a, "triton")
        with FakeTensorMode() as mode:
            tensors = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in a]
            faked = torch.ops.bert_fast.attention_qkv_fwd(*tensors, "triton")
        assert [(one.shape, one.dtype) for one in made] == [(one.shape, one.dtype) for one in faked]
        assert made[2].dim() == (3 if keeps else 1)
    out, lse = made[:2]
    wrong = torch.zeros(2, 9, 96, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mask: expected .*2, 10, 96"):
        torch.ops.bert_fast.attention_qkv_bwd(out, qkv, out, lse, wrong, *a[1:], False, False, False, "triton")


def test_a_layer_keeps_the_mask_as_its_ops_do() -> None:
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=160,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config).half().train()
    ids = torch.randint(0, 30, (2, 150))
    lengths = torch.tensor([150, 13])
    upstream = torch.randn(2, 150, 32, dtype=torch.float16)
    results: list[list[Tensor]] = []
    kept: list[list[torch.Size]] = []
    for is_whole in (True, False):
        model.zero_grad()
        # With a hook on a module of the layer its ops run one by one.
        hook = None if is_whole else model.encoder.layer[0].output.register_forward_hook(lambda *_: None)
        shapes: list[torch.Size] = []

        def look(tensor: Tensor, shapes: list[torch.Size] = shapes) -> Tensor:
            shapes.append(tensor.shape)
            return tensor

        with use_backend("triton"), torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            y = model(ids, torch.arange(150) < lengths[:, None], dropout_seed=SEED).last_hidden_state
            y.backward(upstream)
        kept.append(shapes)
        results.append([y.detach(), *[one.grad.clone() for one in model.parameters() if one.grad is not None]])
        if hook is not None:
            hook.remove()
    assert all(torch.Size((2, 163 // 16 + 2, 96)) in shapes for shapes in kept)
    assert len(results[0]) > 10 and torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):  # gradients that meet are rounded once in the layer
        largest = max(other.abs().max(), 0.01)  # that of the key's bias is 0
        assert (one - other).abs().max() <= RELATIVE["sums_rounded_once"] * largest
