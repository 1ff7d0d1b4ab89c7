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
    had been queued is checked for every sample: otherwise the sample is dropped and the sleep made longer. Where even
    the longest sleep does not suffice (a function that synchronises), `name` becomes "launch-bound" and says so.

    cuda: what has `Event`, `synchronize` and `_sleep`, as torch.cuda; tests give another.
    """

    FIRST_SLEEP, LONGEST_SLEEP = 500_000, 64_000_000  # clock cycles: about 0.3 and 35 ms

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.name = "queue"
        self.host_us = 0.0
        self._cuda = cuda
        self._cycles = self.FIRST_SLEEP

    def microseconds(self, launches: Sequence[Launch]) -> float:
        while True:
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            self._cuda._sleep(self._cycles)
            begin = time.perf_counter()
            start.record()
            kept = [launch() for launch in launches]  # results stay until the end: each has its own memory
            end.record()
            self.host_us = (time.perf_counter() - begin) * 1e6 / len(kept)
            was_queued = not start.query()
            self._cuda.synchronize()
            if was_queued or self._cycles >= self.LONGEST_SLEEP:
                if not was_queued:
                    self.name = "launch-bound"
                return start.elapsed_time(end) * 1e3 / len(kept)
            self._cycles = min(2 * self._cycles, self.LONGEST_SLEEP)
