"""Query, key and value side by side in memory under DDP and FSDP2: two processes make the losses and gradients of one.

Each of two processes gets half of a batch, whose halves weigh the same. What FSDP2 gathers for a layer lies elsewhere:
there the three weights are copied together, and results are the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.modules.attention import BertSelfAttention
from bert_fast.storage import are_neighbours
from bert_fast.testing.tolerances import RELATIVE
from tests.two_processes import WORLD_SIZE, run_two_processes, share

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def make() -> bert_fast.BertModel:
    torch.manual_seed(0)
    return bert_fast.BertModel(bert_fast.BertConfig(**SIZES), add_pooling_layer=False).train()


def batch() -> dict[str, Tensor]:
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1::2, 5:] = 0
    return {
        "input_ids": torch.randint(1, 40, (4, 9), generator=torch.Generator().manual_seed(1)),
        "attention_mask": mask,
    }


def train(model: nn.Module, given: dict[str, Tensor], steps: int = 2) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps of SGD, and the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**given).last_hidden_state.pow(4).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def joined(model: nn.Module) -> list[bool]:
    return [
        are_neighbours(one.query.weight, one.key.weight, one.value.weight)
        for one in model.modules()
        if isinstance(one, BertSelfAttention)
    ]


def ddp(**options: Any) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    def run(given: dict[str, Tensor]) -> dict[str, Any]:
        model = nn.parallel.DistributedDataParallel(make(), **options)
        losses, gradients = train(model, given)
        return {"losses": losses, "gradients": gradients, "joined": joined(model)}

    return run


def fsdp(given: dict[str, Tensor], on_their_own: tuple[str, ...] = ()) -> dict[str, Any]:
    """on_their_own: names of linear layers that are gathered when they are called, each for itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.encoder.layer:
        for name in on_their_own:
            fully_shard(getattr(layer.attention.self, name), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, gradients = train(model, given)
    state = {key: value.full_tensor() for key, value in model.state_dict().items()}
    model.to(torch.float32)  # parameters are DTensors now: there is nothing to join
    return {"losses": losses, "gradients": [g.full_tensor() for g in gradients], "joined": [], "state": state}


SCENARIOS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "ddp": ddp(),
    "ddp, gradients in buckets": ddp(gradient_as_bucket_view=True),
    "fsdp2": fsdp,
    "fsdp2, query and key on their own": lambda given: fsdp(given, ("query", "key")),
}


def work(rank: int) -> dict[str, dict[str, Any]]:
    return {name: run(share(batch(), rank)) for name, run in SCENARIOS.items()}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, every scenario (one start of processes for all)."""
    return run_two_processes(work, tmp_path_factory.mktemp("distributed"))


def close(actual: Tensor, expected: Tensor) -> bool:
    scale = max(1.0, expected.abs().max().item())
    return bool((actual - expected).abs().max() <= RELATIVE["two_processes"] * scale)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_are_one_with_the_joint_batch(of_two: list[dict[str, Any]], scenario: str) -> None:
    model = make()
    losses, gradients = train(model, batch())
    assert losses[0] != losses[1] and len(gradients) > 30
    first, second = (results[scenario] for results in of_two)
    for step, loss in enumerate(losses):
        assert close(torch.tensor((first["losses"][step] + second["losses"][step]) / 2), torch.tensor(loss))
    for results in (first, second):
        assert len(results["gradients"]) == len(gradients) and all(results["joined"])
        for actual, expected in zip(results["gradients"], gradients, strict=True):
            assert close(actual, expected)
    for key, value in first.get("state", {}).items():
        assert close(value, model.state_dict()[key]), key
