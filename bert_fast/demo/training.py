"""Step 3: masked-LM training goes on from the real weights, dropout on, the fast path beside the reference.

Both start from the same weights and get the same batches and the same dropout seed in every step, so they draw the same
masks and must follow the same loss curve. Hugging Face's model draws other masks, so only its speed and memory compare;
it takes part in the first steps.
"""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.demo.checks import Check
from bert_fast.demo.masking import IGNORE_INDEX, mask_tokens
from bert_fast.demo.peer import peer_masked_lm
from bert_fast.demo.progress import Track, silent
from bert_fast.demo.saved_bytes import saved_bytes
from bert_fast.demo.settings import LOSS_TOLERANCE, Settings
from bert_fast.demo.timing import Timing, timed
from bert_fast.models import BertForMaskedLM
from bert_fast.reference.heads import ReferenceBertForMaskedLM
from bert_fast.tokenization import BertTokenizer

__all__ = ["SavedBytes", "TrainingResult", "train"]


@dataclass(frozen=True)
class SavedBytes:
    """Kept for backward by one forward pass of a padded batch."""

    ours: int
    theirs: int


@dataclass(frozen=True)
class TrainingResult:
    """Both loss curves, the speed of a whole step (forward, backward, AdamW), and memory."""

    batch_size: int
    fill: float  # real tokens per token of the padded batches
    dropout_p: float
    learning_rate: float
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    ours: Timing
    reference: Timing
    theirs: Timing  # of the first steps only
    encoder_bytes: SavedBytes
    model_bytes: SavedBytes  # with head and loss

    @property
    def largest_difference(self) -> float:
        """Over the steps, |loss - reference loss| / reference loss."""
        pairs = zip(self.losses, self.reference_losses, strict=True)
        differences = torch.tensor([abs(a - b) / b for a, b in pairs], dtype=torch.float64)
        return differences.max().item()  # NaN if there is one

    @property
    def checks(self) -> tuple[Check, ...]:
        """The distance of the curves."""
        name = "Training losses: relative distance to the reference"
        return (Check.at_most(name, self.largest_difference, LOSS_TOLERANCE),)


@dataclass(frozen=True)
class _Batch:
    inputs: dict[str, Tensor]
    labels: Tensor  # [B, S], -100 where nothing is to be predicted
    positions: Tensor  # of the labelled tokens in the flattened batch

    @property
    def real_tokens(self) -> int:
        return int(self.inputs["attention_mask"].sum())


def train(
    folder: Path,
    tokenizer: BertTokenizer,
    texts: Sequence[str],
    settings: Settings,
    device: torch.device,
    track: Track = silent,
) -> tuple[BertForMaskedLM, TrainingResult]:
    """Trains `settings.steps` steps; returns the fast model, trained, and what was found.

    Args:
        folder: the checkpoint, which has no masked-LM head: its weights are drawn, the same for all models.
        tokenizer: makes the batches.
        texts: passages to draw from.
        settings: amounts.
        device: of all models.
        track: told about every step.
    """
    fast = _with_new_head(folder, settings.seed).to(device)
    reference = ReferenceBertForMaskedLM(fast.config).to(device)
    reference.load_state_dict(fast.state_dict())
    peer = peer_masked_lm(folder, fast.state_dict()).to(device)
    models: dict[str, nn.Module] = {"ours": fast, "reference": reference, "theirs": peer}
    learners = {name: _Learner(model.train(), settings) for name, model in models.items()}
    batches = _batches(tokenizer, texts, settings, fast.config.vocab_size, device)

    encoder_bytes, model_bytes = _memory(fast, peer, batches[0])
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with track("training", settings.steps) as advance:
        for step, batch in enumerate(batches):
            # Any numbers will do, as long as both get the same.
            dropout_seed = torch.tensor([settings.seed * 1_000_003 + step], dtype=torch.int64, device=device)
            # The reference, like the fast path, is to run its head on the labelled rows only: all rows take too long.
            rows = {"labels": batch.labels.flatten()[batch.positions], "masked_lm_positions": batch.positions}
            arguments: dict[str, dict[str, Any]] = {
                "ours": {"labels": batch.labels, "dropout_seed": dropout_seed},
                "reference": {**rows, "dropout_seed": dropout_seed},
                "theirs": {"labels": batch.labels},
            }
            if step == settings.peer_steps:
                del learners["theirs"]
            for name, learner in learners.items():
                seconds[name].append(timed(lambda: learner.step(batch.inputs, arguments[name]), device))  # noqa: B023
                losses[name].append(learner.loss)
            advance()

    tokens = [batch.real_tokens for batch in batches]
    timings = {name: _timing(tokens, values) for name, values in seconds.items()}
    result = TrainingResult(
        batch_size=settings.train_batch_size,
        fill=sum(tokens) / sum(batch.labels.numel() for batch in batches),
        dropout_p=fast.config.hidden_dropout_prob,
        learning_rate=settings.learning_rate,
        losses=tuple(losses["ours"]),
        reference_losses=tuple(losses["reference"]),
        **timings,
        encoder_bytes=encoder_bytes,
        model_bytes=model_bytes,
    )
    return fast.eval(), result


class _Learner:
    """A model with its AdamW and a linear warm-up."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model
        self.loss = float("nan")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True)
        warmup = max(1, settings.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def step(self, inputs: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        loss = self.model(**inputs, **arguments).loss
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()


def _with_new_head(folder: Path, seed: int) -> BertForMaskedLM:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*left at their initial values")  # the head, as the report says
        return BertForMaskedLM.from_pretrained(folder)


def _batches(
    tokenizer: BertTokenizer, texts: Sequence[str], settings: Settings, vocab_size: int, device: torch.device
) -> list[_Batch]:
    drawing, masking = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)
    special_ids = torch.tensor(tokenizer.all_special_ids)
    assert tokenizer.mask_token_id is not None
    batches = []
    for _ in range(settings.steps):
        drawn = drawing.sample(list(texts), min(len(texts), settings.train_batch_size))
        batch = tokenizer(drawn, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt")
        maskable = ~torch.isin(batch["input_ids"], special_ids)
        ids, labels = mask_tokens(batch["input_ids"], maskable, tokenizer.mask_token_id, vocab_size, masking)
        inputs = {name: tensor.to(device) for name, tensor in {**batch, "input_ids": ids}.items()}
        positions = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)
        batches.append(_Batch(inputs, labels.to(device), positions.to(device)))
    return batches


def _memory(fast: BertForMaskedLM, peer: nn.Module, batch: _Batch) -> tuple[SavedBytes, SavedBytes]:
    """(of the encoders, of the models with head and loss)."""
    with torch.random.fork_rng(devices=[]):
        encoders, models = [], []
        model: Any
        for model in (fast, peer):
            encoders.append(saved_bytes(model, lambda: model.bert(**batch.inputs).last_hidden_state))  # noqa: B023
            models.append(saved_bytes(model, lambda: model(**batch.inputs, labels=batch.labels).loss))  # noqa: B023
        return SavedBytes(*encoders), SavedBytes(*models)


def _timing(tokens: Sequence[int], seconds: Sequence[float]) -> Timing:
    """Without the first step, which warms up, if there are others."""
    start = 1 if len(seconds) > 1 else 0
    return Timing(tuple(tokens[start : len(seconds)]), tuple(seconds[start:]))
