"""What transformers' Trainer does to a model besides training it: fused models end where untouched ones do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.testing.tolerances import RELATIVE

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SIZES = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layers run again": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss from the logits": {"label_smoothing_factor": 0.1},
    "noise on the embeddings, by a hook": {"neftune_noise_alpha": 5.0},
    "checkpoints": {"save_strategy": "steps", "save_steps": 2},
}


def _examples() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 50, (16, 7), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(7) < torch.tensor([4, 7, 5, 6] * 4)[:, None]
    return [
        {"input_ids": row, "attention_mask": mask.long(), "labels": torch.where(mask, row, -100)}
        for row, mask in zip(ids, masks, strict=True)
    ]


def _model(fused: bool) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return bert_fast.fuse(model) if fused else model


def _train(folder: Path, fused: bool, options: dict[str, Any]) -> list[float]:
    """Losses on the examples: before, after four steps, and after the last two of them again from a checkpoint."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        use_cpu=True, logging_strategy="no", **{"save_strategy": "no", **options},
    )  # fmt: skip

    def make() -> Any:
        return transformers.Trainer(_model(fused), arguments, train_dataset=_examples(), eval_dataset=_examples())

    trainer = make()
    losses = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    losses.append(trainer.evaluate()["eval_loss"])
    if "save_steps" in options:
        trainer = make()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        losses.append(trainer.evaluate()["eval_loss"])
        assert losses[1] == losses[2]
    return losses


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_fused_ends_where_untouched_does(name: str, tmp_path: Path) -> None:
    theirs, ours = (_train(tmp_path / str(fused), fused, OPTIONS[name]) for fused in (False, True))
    assert theirs[1] < theirs[0], "nothing was learnt: an empty comparison"
    for mine, wanted in zip(ours, theirs, strict=True):
        assert abs(mine - wanted) <= RELATIVE["fine_tuning_loss_4_steps"] * wanted
