"""A pre-training run, and the same in transformers: with the same first weights, batches, masks and learning rates.

Without dropout nothing is left to chance: the losses of the two are to be followed step by step, as far as rounding
allows, and to be of one distribution after that.
"""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_fast import BertConfig, BertForPreTraining
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.training import Trainer, TrainingArguments
from bert_fast.training.losses import loss_parts

_LEARNING_RATE, _WARMUP, _WEIGHT_DECAY = 2e-3, 0.1, 0.01


class _Watched(Trainer):
    """A Trainer that keeps the parts of the loss of every step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parts: list[dict[str, float]] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """See `Trainer.compute_loss`."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.parts.append({name: float(part.detach()) for name, part in loss_parts(outputs, inputs).items()})
        return (loss, outputs) if return_outputs else loss


def beside(
    config: BertConfig, train: PretrainingSource, steps: int, batch_tokens: int = 2048
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """(what we report of a step, what they do): masked_lm, next_sentence and the norm of the gradients.

    Args:
        config: of the model, without dropout.
        train: examples.
        steps: of AdamW, with a tenth of them warm-up, linear decay and clipping to 1.
        batch_tokens: of a step.

    Raises:
        ValueError: the model has dropout.
        ImportError: transformers is not installed.
    """
    if config.hidden_dropout_prob or config.attention_probs_dropout_prob:
        raise ValueError("config: expected no dropout")
    torch.manual_seed(0)
    model = BertForPreTraining(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        theirs = _theirs(Path(folder))
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=_LEARNING_RATE, warmup_steps=_WARMUP, weight_decay=_WEIGHT_DECAY,
            per_device_train_batch_tokens=batch_tokens, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = _Watched(model, arguments, train_dataset=train)
        with contextlib.redirect_stdout(io.StringIO()):  # a line for every step
            trainer.train()
    norms = [{"grad_norm": entry["grad_norm"]} for entry in trainer.state.log_history if "grad_norm" in entry]
    batches = Batches(train, max_tokens=batch_tokens, seed=arguments.seed)
    peer = _steps(theirs, batches, steps, arguments.get_warmup_steps(steps))
    for parts, norm, found in zip(trainer.parts, norms, peer, strict=True):
        yield parts | norm, found


def _theirs(folder: Path) -> Any:
    from transformers import BertForPreTraining as Theirs

    return Theirs.from_pretrained(folder, attn_implementation="eager").train()


def _steps(model: Any, batches: Batches, steps: int, warmup: int) -> Iterator[dict[str, float]]:
    from transformers import get_linear_schedule_with_warmup

    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    step = epoch = 0
    while step < steps:
        for number in range(min(len(batches.plan(epoch)), steps - step)):
            output = model(**padded(batches.batch(epoch, number)))
            output.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield _parts(output, batches.batch(epoch, number)) | {"grad_norm": float(norm)}
            step += 1
        epoch += 1


def padded(batch: Any) -> dict[str, Tensor]:
    """A batch as transformers takes it: [B, S], labels of -100 where nothing is to be predicted."""
    bounds = batch["cu_seqlens"].long()
    lengths = bounds.diff()
    shape = len(lengths), int(lengths.max())
    rows = torch.repeat_interleave(torch.arange(shape[0]), lengths)
    columns = torch.arange(int(bounds[-1])) - bounds[rows]
    whole = torch.full((int(bounds[-1]),), -100)
    whole[batch["masked_lm_positions"]] = batch["labels"]
    entries = {"input_ids": batch["input_ids"], "token_type_ids": batch["token_type_ids"], "labels": whole}
    made = {name: torch.zeros(shape, dtype=torch.long) for name in entries} | {
        "attention_mask": torch.zeros(shape, dtype=torch.long)
    }
    made["labels"].fill_(-100)
    for name, values in entries.items():
        made[name][rows, columns] = values
    made["attention_mask"][rows, columns] = 1
    return made | {"next_sentence_label": batch["next_sentence_label"]}


def _parts(output: Any, batch: Any) -> dict[str, float]:
    follows = torch.nn.functional.cross_entropy(output.seq_relationship_logits, batch["next_sentence_label"]).item()
    return {"masked_lm": output.loss.item() - follows, "next_sentence": follows}


def summary(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """How far the two are apart: the first step at which masked_lm differs by more than 1e-4, 1e-3, 1e-2; means."""
    ours, theirs = (np.array([pair[side]["masked_lm"] for pair in pairs]) for side in (0, 1))
    apart = np.abs(ours - theirs)
    first = {str(bound): next(iter((np.flatnonzero(apart > bound) + 1).tolist()), None) for bound in (1e-4, 1e-3, 1e-2)}
    last = slice(-max(1, len(ours) // 10), None)
    return {
        "steps": len(pairs),
        "first_step_apart_by": first,
        "largest": float(apart.max()),
        "mean_of_last_tenth": [round(float(side[last].mean()), 4) for side in (ours, theirs)],
    }
