"""Clocks: how long one of several launches takes, on a device's own time or on the host's."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "HostClock", "QueueClock"]

Launch = Callable[[], object]


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
    had been queued is checked for every sample: otherwise the sample is dropped and the sleep made longer. Where the
    longest sleep does not suffice, more launches were given than the queue takes, and they are timed in smaller groups;
    where a single one cannot be queued, the function synchronises: `name` becomes "launch-bound" and says so.

    cuda: what has `Event`, `synchronize` and `_sleep`, as torch.cuda; tests give another.
    """

    FIRST_SLEEP, LONGEST_SLEEP = 500_000, 64_000_000  # clock cycles: about 0.3 and 35 ms

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.name = "queue"
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
                self.name = "launch-bound"
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
            if was_queued or self.name == "launch-bound":
                kept += results
                return start.elapsed_time(end) * 1e3, host
            if self._cycles >= self.LONGEST_SLEEP:
                return None, host
            self._cycles = min(2 * self._cycles, self.LONGEST_SLEEP)
            del results  # or the next try would need as much memory again
