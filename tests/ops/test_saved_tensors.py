"""Ops accept a copy from a hook on saved tensors, and raise if a hook returns a tensor of another shape."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bert_fast import ops
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops.packing import Packing

T, H = 6, 8
CONFIG = SimpleNamespace(
    hidden_size=H, intermediate_size=12, num_attention_heads=2, layer_norm_eps=1e-12, hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.2, hidden_act="gelu",
)  # fmt: skip
SEED = torch.tensor([3])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def coords() -> Tensor:
    return Packing.from_cu_seqlens(torch.tensor([0, 2, T], dtype=torch.int32), 4, T).coords


def layer() -> Tensor:
    packing = Packing.from_cu_seqlens(torch.tensor([0, 2, T], dtype=torch.int32), 4, T)
    return BertLayer(CONFIG, 0).train()(random(T, H), call=Call(packing, SEED))


def embedding() -> Tensor:
    ids = torch.tensor([1, 2, 3, 1, 2, 0])
    return ops.embedding(
        ids, random(5, H), random(4, H), random(H), random(H), token_type_ids=ids % 4, position_ids=torch.arange(T),
        position_table=random(T, H), dropout_p=0.5, seed=SEED, coords=coords(),
    )  # fmt: skip


CALLS: dict[str, Callable[[], Tensor]] = {
    "layer": layer,
    "embedding": embedding,
    "gated_mlp": lambda: ops.gated_mlp(
        random(T, H),
        random(12, H),
        None,
        random(12, H),
        None,
        random(9, 12),
        dropout_p=0.5,
        seed=SEED,
        coords=coords(),
        site=7,
    ),
    "linear_gelu": lambda: ops.linear_gelu(random(T, H), random(12, H), random(12)),
    "layer_norm": lambda: ops.layer_norm(random(T, H), random(H), random(H), eps=1e-5),
    "dropout": lambda: ops.dropout(random(T, H), 0.5, seed=SEED, coords=coords(), site=0),
    "rotary": lambda: ops.rotary(random(T, 3, 2, 8), torch.ones(T, 4), torch.zeros(T, 4)),
    "cross_entropy": lambda: ops.cross_entropy(random(T, 9), torch.arange(T)),
    "linear_cross_entropy": lambda: ops.linear_cross_entropy(random(T, H), random(9, H), random(9), torch.arange(T)),
    "splade": lambda: ops.splade(random(T, H), random(9, H), random(9), torch.tensor([0, 2, T], dtype=torch.int32)),
}


def run(call: Callable[[], Tensor], unpack: Callable[[int, Tensor], Tensor]) -> None:
    """Runs both passes. unpack: returns what the hook returns for the n-th saved tensor."""
    torch.manual_seed(0)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with saved_tensors_hooks(pack, lambda place: unpack(place, saved[place])):
        y = call()
    y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_saved_tensor_of_another_shape_raises(name: str) -> None:
    call = CALLS[name]
    shapes: dict[int, tuple[int, ...]] = {}

    def copied(place: int, tensor: Tensor) -> Tensor:
        shapes[place] = tuple(tensor.shape)
        return tensor.clone()

    run(call, copied)
    longer = [place for place, shape in shapes.items() if shape and shape[0] > 1]
    assert longer
    for cut in longer:
        with pytest.raises(RuntimeError, match=rf"\w+: expected shape \[{shapes[cut][0]}.* back from hooks on saved"):
            run(call, lambda place, tensor, cut=cut: tensor[:1] if place == cut else tensor)


def test_the_message_names_the_tensor() -> None:
    def cut(place: int, tensor: Tensor) -> Any:
        return tensor[:4] if tensor.shape == (12, H) else tensor

    with pytest.raises(RuntimeError, match=r"weight: expected shape \[12, 8\] back from hooks .*, got \[4, 8\]"):
        run(CALLS["linear_gelu"], cut)
