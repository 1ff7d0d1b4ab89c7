"""Step 2: the real weights in both implementations: hidden states and speed at the text's own lengths."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_fast.demo.checks import Check
from bert_fast.demo.peer import load_peer_encoder
from bert_fast.demo.progress import Track, silent
from bert_fast.demo.settings import HIDDEN_STATES_TOLERANCE, Settings
from bert_fast.demo.timing import Timing, interleaved
from bert_fast.models import BertModel
from bert_fast.tokenization import BertTokenizer

__all__ = ["InferenceResult", "compare_inference"]


@dataclass(frozen=True)
class InferenceResult:
    """Encoder forward passes, on batches padded to their longest passage and on the same batches packed."""

    batch_size: int
    num_batches: int
    real_tokens: int  # of a round
    padded_tokens: int
    largest_difference: float  # of hidden states to Hugging Face's, on real tokens
    largest_packed_difference: float
    padded: Timing
    packed: Timing
    theirs: Timing

    @property
    def fill(self) -> float:
        """Real tokens per token of the padded batches."""
        return self.real_tokens / self.padded_tokens

    @property
    def checks(self) -> tuple[Check, ...]:
        """Padded and packed hidden states against Hugging Face's."""
        found = {"padded": self.largest_difference, "packed": self.largest_packed_difference}
        return tuple(
            Check.at_most(f"Hidden states, {kind}: distance to transformers", value, HIDDEN_STATES_TOLERANCE)
            for kind, value in found.items()
        )


def compare_inference(
    folder: Path,
    model: BertModel,
    tokenizer: BertTokenizer,
    texts: Sequence[str],
    settings: Settings,
    track: Track = silent,
) -> InferenceResult:
    """Runs `model` and Hugging Face's BertModel on the same random batches, in turn.

    Both get the same padded batches with their masks; `model` gets them once more packed.

    Args:
        folder: the checkpoint, for Hugging Face's model.
        model: ours, of the same checkpoint, in evaluation mode.
        tokenizer: makes the batches.
        texts: passages to draw from.
        settings: amounts.
        track: told about every forward pass of a round.
    """
    device = model.device
    peer = load_peer_encoder(folder).to(device)
    count = min(len(texts), settings.inference_batch_size * settings.inference_batches)
    drawn = random.Random(settings.seed).sample(list(texts), count)
    size = settings.inference_batch_size
    groups = [drawn[start : start + size] for start in range(0, count, size)]
    limit = settings.max_length
    padded = [
        dict(tokenizer(group, padding=True, truncation=True, max_length=limit, return_tensors="pt").to(device))
        for group in groups
    ]
    packed = [tokenizer.pack(group, max_length=limit).to(device) for group in groups]
    real_tokens = sum(int(batch["attention_mask"].sum()) for batch in padded)

    def through(run: Callable[[dict], Tensor], batches: Sequence[dict]) -> Callable[[], list[Tensor]]:
        return lambda: [run(batch) for batch in batches]

    contestants = {
        "theirs": through(lambda batch: peer(**batch).last_hidden_state, padded),
        "padded": through(lambda batch: model(**batch).last_hidden_state, padded),
        "packed": through(lambda batch: model(**batch).last_hidden_state, packed),
    }
    with torch.inference_mode(), track("embedding", 3 * (1 + settings.inference_rounds)) as advance:
        states = {}
        for name, run in contestants.items():
            states[name] = run()
            advance()
        keeps = [batch["attention_mask"].bool() for batch in padded]
        differences = {"padded": 0.0, "packed": 0.0}
        for theirs, ours, rows, keep in zip(states["theirs"], states["padded"], states["packed"], keeps, strict=True):
            expected = theirs[keep]
            differences["padded"] = _larger(differences["padded"], ours[keep] - expected)
            differences["packed"] = _larger(differences["packed"], rows - expected)
        timings = interleaved(contestants, real_tokens, settings.inference_rounds, advance, device, warmup=0)
    return InferenceResult(
        batch_size=size,
        num_batches=len(groups),
        real_tokens=real_tokens,
        padded_tokens=sum(batch["attention_mask"].numel() for batch in padded),
        largest_difference=differences["padded"],
        largest_packed_difference=differences["packed"],
        **timings,
    )


def _larger(largest: float, difference: Tensor) -> float:
    """The larger of a number and the largest magnitude in a tensor; NaN if the tensor has one."""
    return torch.cat([difference.abs().flatten(), difference.new_tensor([largest])]).max().item()
