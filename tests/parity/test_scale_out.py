"""Models under the tools that scale training: DDP, FSDP2, transformers' Trainer, DataLoader workers."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.testing.tolerances import RELATIVE
from tests.patience import PATIENCE_S
from tests.two_processes import WORLD_SIZE, run_two_processes, share

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3,
)  # fmt: skip


def _model(name: str, dropout_p: float = 0.0, **arguments: bool) -> nn.Module:
    probabilities = {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}
    torch.manual_seed(0)
    config = bert_fast.BertConfig(**SIZES, **probabilities, initializer_range=0.2)
    return getattr(bert_fast, name)(config, **arguments).train()


def _batch(name: str) -> dict[str, Tensor]:
    """Four sequences; both halves hold equally many labels, so the mean of the halves' losses is the loss."""
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(1, 50, (4, 9), generator=generator), "attention_mask": torch.ones(4, 9)}
    batch["attention_mask"][1::2, 5:] = 0
    if name == "BertForSequenceClassification":
        batch["labels"] = torch.tensor([0, 1, 2, 0])
    if name in ("BertForMaskedLM", "BertForPreTraining"):
        batch["labels"] = torch.where(torch.arange(9) < 4, batch["input_ids"], -100)
    if name == "BertForPreTraining":
        batch["next_sentence_label"] = torch.tensor([0, 1, 1, 0])
    if name == "BertForTokenClassification":
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, -100)
    return batch


def _packed(batch: dict[str, Tensor]) -> dict[str, Tensor | int]:
    """A batch with a label for every token, without its padding."""
    keep = batch["attention_mask"] == 1
    cu_seqlens = nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    packed = {name: value[keep] for name, value in batch.items() if name != "attention_mask"}
    return {**packed, "cu_seqlens": cu_seqlens, "max_seqlen": 9}


def _two_steps(model: nn.Module, batch: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        output = model(**batch)
        loss = output.loss if "labels" in batch else output.last_hidden_state.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _ddp(name: str, **arguments: bool) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    wrap = {key: arguments.pop(key) for key in ("find_unused_parameters",) if key in arguments}
    packed = arguments.pop("packed", False)

    def train(batch: dict[str, Tensor]) -> list[Tensor]:
        model = nn.parallel.DistributedDataParallel(_model(name, **arguments), **wrap)
        _two_steps(model, _packed(batch) if packed else batch)
        return [p.detach() for p in model.module.parameters()]

    return train


def _fsdp(name: str, checkpointing: bool = False) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    def train(batch: dict[str, Tensor]) -> list[Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = _model(name)
        if checkpointing:
            model.gradient_checkpointing_enable()
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _two_steps(model, batch)
        return [p.full_tensor().detach() for p in model.parameters()]

    return train


# name -> (model, its constructor's arguments, how it is trained by two processes)
SCENARIOS = {
    "ddp": ("BertForSequenceClassification", {}, _ddp("BertForSequenceClassification")),
    "ddp, tied weights": ("BertForMaskedLM", {}, _ddp("BertForMaskedLM")),
    "ddp, no pooler": ("BertModel", {"add_pooling_layer": False}, _ddp("BertModel", add_pooling_layer=False)),
    "ddp, unused pooler": ("BertModel", {}, _ddp("BertModel", find_unused_parameters=True)),
    "ddp, packed": ("BertForTokenClassification", {}, _ddp("BertForTokenClassification", packed=True)),
    "fsdp2": ("BertForSequenceClassification", {}, _fsdp("BertForSequenceClassification")),
    "fsdp2, tied weights": ("BertForMaskedLM", {}, _fsdp("BertForMaskedLM")),
    "fsdp2, checkpointing": ("BertForPreTraining", {}, _fsdp("BertForPreTraining", checkpointing=True)),
}


def _work(rank: int) -> dict[str, list[Tensor]]:
    return {scenario: train(share(_batch(name), rank)) for scenario, (name, _, train) in SCENARIOS.items()}


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """Parameters after two steps of two processes, every scenario (one start of processes for all)."""
    return run_two_processes(_work, tmp_path_factory.mktemp("distributed"))[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_equal_one_on_the_joint_batch(trained_by_two, scenario):
    name, arguments, _ = SCENARIOS[scenario]
    model = _model(name, **arguments)
    start = [p.detach().clone() for p in model.parameters()]
    _two_steps(model, _batch(name))
    moved = 0
    for before, alone, together in zip(start, model.parameters(), trained_by_two[scenario], strict=True):
        moved += int(not torch.equal(before, alone))
        assert (alone - together).abs().max() <= RELATIVE["two_processes"] * max(1.0, alone.abs().max().item())
    assert moved > 10, "nothing was trained: the comparison would be empty"


class _Examples(torch.utils.data.Dataset):
    def __init__(self, name: str) -> None:
        self.name = name
        self.ids = torch.randint(1, 50, (16, 7), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        labels = ids if self.name == "BertForMaskedLM" else ids[0] % 3
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _trainer(folder: Path, name: str, **options: object) -> object:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        use_cpu=True, logging_strategy="no", **options,
    )  # fmt: skip
    examples = _Examples(name)
    return transformers.Trainer(_model(name, 0.1), arguments, train_dataset=examples, eval_dataset=examples)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForSequenceClassification", {}),
        ("BertForSequenceClassification", {"gradient_checkpointing": True, "bf16": True}),
        ("BertForSequenceClassification", {"gradient_accumulation_steps": 2}),
        ("BertForMaskedLM", {}),
        ("BertForPreTraining", {"remove_unused_columns": True, "prediction_loss_only": True}),
    ],
)
def test_trainer_trains_and_evaluates(tmp_path, name, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations
        trainer = _trainer(tmp_path, name, save_strategy="no", **options)
        if name == "BertForPreTraining":  # its loss needs both kinds of labels
            trainer.train_dataset = trainer.eval_dataset = _both_labels(trainer.train_dataset)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < before


def _both_labels(examples: _Examples) -> list[dict[str, Tensor]]:
    items = (examples[i] for i in range(len(examples)))
    return [item | {"labels": item["input_ids"], "next_sentence_label": item["input_ids"][0] % 2} for item in items]


def test_trainer_resumes_to_the_same_parameters(tmp_path):
    """Dropout on: masks come from PyTorch's generator, whose state the checkpoint holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _trainer(tmp_path, "BertForSequenceClassification", save_strategy="steps", save_steps=2)
        trainer.train()
        again = _trainer(tmp_path, "BertForSequenceClassification", save_strategy="no")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    pairs = zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class _Encodes(torch.utils.data.Dataset):
    """Runs tokenizer and model where it is asked for an item: in a DataLoader's worker."""

    def __init__(self, tokenizer: bert_fast.BertTokenizer, model: nn.Module) -> None:
        self.tokenizer, self.model = tokenizer, model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        ids = self.tokenizer(["a b c", "b"][index], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return self.model(ids).pooler_output[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_workers_run_tokenizer_and_model_after_the_parent_did():
    """PyTorch sets one thread in workers, which keeps OpenMP's forked thread pool out of the way."""
    tokenizer = bert_fast.BertTokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6})
    examples = _Encodes(tokenizer, _model("BertModel").eval())
    tokenizer(["a b"] * 500)
    wanted = torch.stack([examples[0], examples[1]])
    loader = torch.utils.data.DataLoader(
        examples, batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=PATIENCE_S
    )
    assert torch.allclose(next(iter(loader)), wanted)
