"""Everything the demo found, and the one table that terminal and report both show."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from bert_fast.demo.checkpoint import CheckpointResult
from bert_fast.demo.checks import Check
from bert_fast.demo.environment import Environment
from bert_fast.demo.inference import InferenceResult
from bert_fast.demo.search import SearchResult
from bert_fast.demo.settings import Settings
from bert_fast.demo.tokenizing import TokenizerResult
from bert_fast.demo.training import TrainingResult

__all__ = ["DemoResults", "Row"]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    ours: str
    peer: str
    theirs: str
    ratio: str


@dataclass(frozen=True)
class DemoResults:
    """What the five steps returned."""

    settings: Settings
    environment: Environment
    tokenizer: TokenizerResult
    inference: InferenceResult
    training: TrainingResult
    search: SearchResult
    checkpoint: CheckpointResult
    seconds: float

    @property
    def checks(self) -> tuple[Check, ...]:
        """Of all steps."""
        return (*self.tokenizer.checks, *self.inference.checks, *self.training.checks, *self.checkpoint.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """Those that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The table."""
        peer = "transformers, SDPA"
        speeds = (
            ("Tokenize", self.tokenizer.ours, "tokenizers", self.tokenizer.theirs),
            ("Encode, padded", self.inference.padded, peer, self.inference.theirs),
            ("Encode, packed", self.inference.packed, f"{peer}, padded", self.inference.theirs),
            ("Training step", self.training.ours, peer, self.training.theirs),
            ("Training step", self.training.ours, "reference", self.training.reference),
        )
        memory = (
            ("Kept for backward, encoder", self.training.encoder_bytes),
            ("Kept for backward, with head", self.training.model_bytes),
        )
        rows = [
            Row(
                what,
                "tokens/s",
                rate(ours.tokens_per_s),
                name,
                rate(theirs.tokens_per_s),
                times(ours.speedup_over(theirs)),
            )
            for what, ours, name, theirs in speeds
        ]
        rows += [
            Row(what, "MB", megabytes(saved.ours), peer, megabytes(saved.theirs), f"{saved.ours / saved.theirs:.0%}")
            for what, saved in memory
        ]
        return tuple(rows)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries; NaN becomes None."""
        return {"finished": True, "checks": _plain([asdict(check) for check in self.checks]), **_plain(asdict(self))}


def rate(tokens_per_s: float) -> str:
    """Three significant digits: the rest is noise."""
    digits = max(0, 2 - math.floor(math.log10(tokens_per_s))) if tokens_per_s > 0 else 0
    rounded = float(f"{tokens_per_s:.3g}")
    return f"{rounded:,.{digits}f}"


def times(ratio: float) -> str:
    """How many times as fast."""
    return f"{ratio:.1f}×" if ratio >= 9.95 else f"{ratio:.2f}×"


def megabytes(count: int) -> str:
    """Decimal megabytes."""
    return f"{count / 1e6:,.1f}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
