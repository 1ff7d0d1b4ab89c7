"""Step 5: the trained model as a checkpoint directory that `transformers` opens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_fast.demo.checks import Check
from bert_fast.demo.peer import open_checkpoint
from bert_fast.demo.progress import Track, silent
from bert_fast.demo.settings import RELOADED_LOGITS_TOLERANCE
from bert_fast.models import BertForMaskedLM
from bert_fast.tokenization import BertTokenizer

__all__ = ["CheckpointResult", "save_and_reopen"]


@dataclass(frozen=True)
class CheckpointResult:
    """What `transformers` makes of the directory."""

    files: tuple[str, ...]
    num_bytes: int
    opened_as: str  # classes, or the error
    same_ids: bool
    largest_difference: float  # of masked-LM logits on real tokens, relative to the largest logit; NaN if not opened

    @property
    def checks(self) -> tuple[Check, ...]:
        """Tokenizer and model."""
        ids = "equal" if self.same_ids else f"different: {self.opened_as}"
        return (
            Check("Checkpoint in transformers: token ids", ids, "equal", self.same_ids),
            Check.at_most(
                "Checkpoint in transformers: logits, relative distance",
                self.largest_difference,
                RELOADED_LOGITS_TOLERANCE,
            ),
        )


def save_and_reopen(
    folder: Path,
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    texts: Sequence[str],
    max_length: int,
    track: Track = silent,
) -> CheckpointResult:
    """Saves model and tokenizer, opens them with AutoModelForMaskedLM and AutoTokenizer, compares on `texts`.

    Raises:
        CheckpointError, OSError: the directory cannot be written.
    """
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
    with track("saving, opening again", 3) as advance:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        advance()
        files = tuple(sorted(path.name for path in folder.iterdir()))
        num_bytes = sum((folder / name).stat().st_size for name in files)
        try:
            peer, peer_tokenizer = open_checkpoint(folder)
        except Exception as error:  # whatever transformers raises: the check fails, the report is still written
            problem = f"{type(error).__name__}: {error}"
            return CheckpointResult(files, num_bytes, problem, False, float("nan"))
        advance()
        ours, theirs = tokenizer(list(texts), **options), peer_tokenizer(list(texts), **options)
        same_ids = torch.equal(ours["input_ids"], theirs["input_ids"])
        inputs = {name: tensor.to(model.device) for name, tensor in ours.items()}
        with torch.inference_mode():
            keep = inputs["attention_mask"].bool()
            expected = peer.to(model.device)(**inputs).logits[keep]
            difference = (model(**inputs).logits[keep] - expected).abs().max() / expected.abs().max()
        advance()
    opened_as = f"{type(peer).__name__}, {type(peer_tokenizer).__name__}"
    return CheckpointResult(files, num_bytes, opened_as, same_ids, difference.item())
