"""How times are taken: contestants in turn, a device's own clock or the host's, cases for as long as there is time.

Importing this module imports no torch.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Launch = Callable[[], object]
AnyCase = TypeVar("AnyCase")


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

    def microseconds(self) -> dict[str, float]:
        """Median and quantiles as results have them."""
        low, high = self.quantiles()
        return {name: round(s * 1e6, 2) for name, s in (("us", self.median), ("us_p20", low), ("us_p80", high))}

    def milliseconds(self) -> dict[str, float]:
        """The same in milliseconds, for what takes long."""
        low, high = self.quantiles()
        return {name: round(s * 1e3, 3) for name, s in (("ms", self.median), ("ms_p20", low), ("ms_p80", high))}

    def speedup_over(self, other: "Times") -> float:
        """Median over rounds of (other's time / my time in the same round)."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def interleaved(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Times every contestant `rounds` times, A B C A B C ..., after `warmup` uncounted rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_index in range(warmup + rounds):
        for name, run in contestants.items():
            start = clock()
            run()
            if round_index >= warmup:
                seconds[name].append(clock() - start)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


class Clock(Protocol):
    """Times a batch of launches; `host_us` is what the last batch cost the host, a launch."""

    name: str
    host_us: float

    def microseconds(self, launches: Sequence[Launch]) -> float:
        """Microseconds of one launch: the time of all, divided by their number."""
        ...


class HostClock:
    """Wall time, for a CPU."""

    name = "host"
    host_us = 0.0

    def microseconds(self, launches: Sequence[Launch]) -> float:
        start = time.perf_counter()
        kept = [launch() for launch in launches]
        self.host_us = (time.perf_counter() - start) * 1e6 / len(kept)
        return self.host_us


class QueueClock:
    """Device time of launches that wait in the queue, so that the host's time to launch them is no part of it.

    The device is first put to sleep. While it sleeps the host queues an event, all launches, and an event; then the
    device works through them without waiting for the host. That the first event was still pending when the last launch
    had been queued is checked for every sample: otherwise the sample is dropped and the sleep made twice as long, or as
    long as the host had needed, if that is longer: a slow function is not launched again and again. Where the longest
    sleep does not suffice, more launches were given than the queue takes, and they are timed in smaller groups; where a
    single one cannot be queued, the function synchronises: `name` becomes "launch-bound" and says so.

    cuda: what has `Event`, `synchronize` and `_sleep`, as torch.cuda, which it is by default.
    """

    FIRST_SLEEP, LONGEST_SLEEP = 500_000, 64_000_000  # clock cycles: about 0.3 and 35 ms
    CYCLES_PER_US = 2000  # of the fastest devices
    QUEUE, LAUNCH_BOUND = "queue", "launch-bound"

    def __init__(self, cuda: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self.name = self.QUEUE
        self.host_us = 0.0
        self._cuda = cuda
        self._cycles = self.FIRST_SLEEP
        self._group: int | None = None  # launches timed at once; all of them as long as the queue takes them

    def microseconds(self, launches: Sequence[Launch]) -> float:
        while True:
            size = self._group or len(launches)
            kept: list[object] = []  # results stay until the end: each has its own memory
            begun, total = 0.0, 0.0
            for first in range(0, len(launches), size):
                microseconds, host = self._sample(launches[first : first + size], kept)
                if microseconds is None:
                    break
                begun, total = begun + host, total + microseconds
            else:
                self.host_us = begun / len(launches)
                return total / len(launches)
            del kept
            if size == 1:
                self.name = self.LAUNCH_BOUND
            self._group, self._cycles = max(1, size // 2), self.FIRST_SLEEP

    def _sample(self, launches: Sequence[Launch], kept: list[object]) -> tuple[float | None, float]:
        """(device microseconds of all, or None where they could not be queued; host microseconds)."""
        while True:
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            self._cuda._sleep(self._cycles)
            begin = time.perf_counter()
            start.record()
            results = [launch() for launch in launches]
            end.record()
            host = (time.perf_counter() - begin) * 1e6
            was_queued = not start.query()
            self._cuda.synchronize()
            if was_queued or self.name == self.LAUNCH_BOUND:
                kept += results
                return start.elapsed_time(end) * 1e3, host
            if self._cycles >= self.LONGEST_SLEEP:
                return None, host
            self._cycles = min(max(2 * self._cycles, int(host * self.CYCLES_PER_US)), self.LONGEST_SLEEP)
            del results  # or the next try would need as much memory again


class Seconds:
    """The time a part has; leaves no case half done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def of(self, cases: list[AnyCase], leave_out: Callable[[AnyCase, str], None]) -> Iterator[AnyCase]:
        """Yields cases as long as another would still fit; says how far it is.

        Another is taken to need what four of five cases so far have not exceeded (with up to three cases, the longest):
        a single slow one does not leave out all that follow.
        """
        times: list[float] = []
        for case in cases:
            start = time.monotonic()
            if start + (Times(tuple(times)).quantiles()[1] if times else 0.0) > self._end:
                leave_out(case, "no time left in this part")
                continue
            yield case
            now = time.monotonic()
            times.append(now - start)
            rest = (len(cases) - len(times)) * sum(times) / len(times)
            left = self._end - now
            text = f"{len(times)} of {len(cases)} cases; the rest needs about {rest:.0f} s"
            print(text if left == math.inf else f"{text}, {left:.0f} s are left", flush=True)
