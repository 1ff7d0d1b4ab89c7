"""Fused models trained by two processes: the parameters of one process with the joint batch."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.testing.parity import randomize
from bert_fast.testing.tolerances import RELATIVE
from tests.huggingface.families import ALIKE, CONFIG, configuration
from tests.two_processes import WORLD_SIZE, run_two_processes, share

transformers = pytest.importorskip("transformers", minversion="5")

FAMILIES = [prefix for prefix in CONFIG if prefix not in ALIKE]
SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def _model(name: str) -> Any:
    cls = getattr(transformers, name)
    prefix = name.split("For")[0]
    own = {"seq_classif_dropout": 0.0} if prefix == "DistilBert" else {}
    model = fuse(cls(configuration(cls, **SIZES, **CONFIG.get(prefix, {}), **own)))
    randomize(model)
    return model.train()


def _batch(name: str) -> dict[str, Tensor]:
    """Four sequences; both halves hold equally many labels, so the mean of the halves' losses is the loss."""
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(1, 50, (4, 9), generator=generator), "attention_mask": torch.ones(4, 9)}
    batch["attention_mask"][1::2, 5:] = 0
    if name.endswith("ForMaskedLM"):
        return {**batch, "labels": torch.where(torch.arange(9) < 4, batch["input_ids"], -100)}
    return {**batch, "labels": torch.tensor([0, 1, 2, 0])}


def _two_steps(model: nn.Module, batch: dict[str, Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _ddp(name: str, batch: dict[str, Tensor]) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(_model(name))
    _two_steps(model, batch)
    return [p.detach() for p in model.module.parameters()]


def _fsdp(name: str, batch: dict[str, Tensor], shards_bert: bool = False) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model(name)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    layers = next(one for one in model.modules() if isinstance(one, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    if shards_bert:
        fully_shard(model.base_model, mesh=mesh)
    fully_shard(model, mesh=mesh)
    encoder = model.base_model.encoder
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert why_not(model.base_model, **inputs) == []
    own = type(encoder).forward_packed
    with mock.patch.object(type(encoder), "forward_packed", autospec=True, side_effect=own) as packed:
        _two_steps(model, batch)
    assert packed.call_count == 2
    with pytest.raises(ValueError, match="expected classes that fuse made, got FSDP"):
        unfuse(model)
    return [p.full_tensor().detach() for p in model.parameters()]


def _fsdp_with_bert(name: str, batch: dict[str, Tensor]) -> list[Tensor]:
    return _fsdp(name, batch, shards_bert=True)


SCENARIOS: dict[str, tuple[str, Callable[[str, dict[str, Tensor]], list[Tensor]]]] = {
    "ddp": ("BertForSequenceClassification", _ddp),
    "ddp, tied weights": ("BertForMaskedLM", _ddp),
    "fsdp2": ("BertForSequenceClassification", _fsdp),
    "fsdp2, tied weights": ("BertForMaskedLM", _fsdp),
    "fsdp2, the BertModel on its own": ("BertForSequenceClassification", _fsdp_with_bert),
    **{f"ddp, {prefix}": (f"{prefix}ForSequenceClassification", _ddp) for prefix in FAMILIES},
    **{f"fsdp2, {prefix}": (f"{prefix}ForMaskedLM", _fsdp) for prefix in FAMILIES},
}


def _work(rank: int) -> dict[str, list[Tensor]]:
    return {scenario: train(name, share(_batch(name), rank)) for scenario, (name, train) in SCENARIOS.items()}


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """Parameters after two steps of two processes, every scenario (one start of processes for all)."""
    return run_two_processes(_work, tmp_path_factory.mktemp("distributed"))[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_equal_one_on_the_joint_batch(trained_by_two, scenario) -> None:
    name, _ = SCENARIOS[scenario]
    model = _model(name)
    start = [p.detach().clone() for p in model.parameters()]
    _two_steps(model, _batch(name))
    moved = 0
    for before, alone, together in zip(start, model.parameters(), trained_by_two[scenario], strict=True):
        moved += int(not torch.equal(before, alone))
        assert (alone - together).abs().max() <= RELATIVE["two_processes"] * max(1.0, alone.abs().max().item())
    assert moved > 10, "nothing was trained: the comparison would be empty"
