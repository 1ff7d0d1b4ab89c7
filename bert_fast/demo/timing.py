"""Speeds: the contestants in turn, round after round, so that a machine's moods hit all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Timing", "interleaved", "timed"]


@dataclass(frozen=True)
class Timing:
    """Rounds of one contestant: how many real tokens (padding does not count) it got through, in how many seconds."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(count / s for count, s in zip(self.tokens, self.seconds, strict=True))

    def speedup_over(self, other: "Timing") -> float:
        """Median over the rounds that both took part in of (other's time / my time in the same round)."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=False))


def timed(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of one call, until the device is done."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    tokens: int,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    device: torch.device | None = None,
    warmup: int = 1,
) -> dict[str, Timing]:
    """Times every contestant in every round, A B C A B C ..., after `warmup` rounds that do not count.

    Args:
        contestants: by name.
        tokens: real tokens that each call gets through.
        rounds: that count.
        advance: called after every call, (warmup + rounds) * len(contestants) times.
        device: waited for before and after every call.
        warmup: rounds before those that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(warmup + rounds):
        for name, run in contestants.items():
            spent = timed(run, device)
            if index >= warmup:
                seconds[name].append(spent)
            advance()
    return {name: Timing((tokens,) * rounds, tuple(values)) for name, values in seconds.items()}


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
