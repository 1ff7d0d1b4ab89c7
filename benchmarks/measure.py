"""How times are taken: the contestants in turn, round after round, so that drift of the machine hits all alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Times", "interleaved"]


@dataclass(frozen=True)
class Times:
    """Seconds of every round of one contestant."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def quantiles(self) -> tuple[float, float]:
        """The 20 % and 80 % quantiles, seconds."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.2 * last)], ordered[round(0.8 * last)]

    def speedup_over(self, other: "Times") -> float:
        """Median over rounds of (other's time / my time in the same round)."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, Times]:
    """Times every contestant `rounds` times, A B C A B C ..., after `warmup` uncounted rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_index in range(warmup + rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_index >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: Times(tuple(values)) for name, values in seconds.items()}
