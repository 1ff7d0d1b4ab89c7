"""The device clock, on a device made for the test: samples count only when all launches were queued in time."""

import pytest

from benchmarks.kit import clock as clock_module
from benchmarks.kit.clock import HostClock, QueueClock


class FakeCuda:
    """A device that works through its queue on its own time; the host needs `host_cost` for each launch."""

    def __init__(self, host_cost: float, queue_length: int = 10**6) -> None:
        self.host_cost, self.queue_length = host_cost, queue_length
        self.waiting = 0
        self.host, self.device = 0.0, 0.0
        self.sleeps: list[int] = []

    def _sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.device = max(self.device, self.host) + cycles / 1e6  # 1 GHz: milliseconds

    def launch(self, duration: float) -> None:
        self.host += self.host_cost
        self.waiting += 1
        if self.waiting > self.queue_length:  # the host waits for room in the queue
            self.host = max(self.host, self.device)
        self.device = max(self.device, self.host) + duration

    def synchronize(self) -> None:
        self.waiting = 0
        self.host = max(self.host, self.device)

    def Event(self, enable_timing: bool) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.at = max(self.cuda.device, self.cuda.host)

    def query(self) -> bool:
        return self.at <= self.cuda.host

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


@pytest.mark.parametrize("host_cost", [0.001, 0.06, 1.0])  # of a launch, in milliseconds; the kernel takes 0.002
def test_the_time_of_the_host_is_no_part_of_it(host_cost: float) -> None:
    cuda = FakeCuda(host_cost)
    clock = QueueClock(cuda)
    microseconds = clock.microseconds([lambda: cuda.launch(0.002)] * 10)
    assert round(microseconds, 3) == 2.0
    assert clock.name == "queue"
    assert cuda.sleeps[-1] / 1e6 > 10 * host_cost, "the device slept until everything was queued"
    again = len(cuda.sleeps)
    clock.microseconds([lambda: cuda.launch(0.002)] * 10)
    assert len(cuda.sleeps) == again + 1, "what was long enough once is not searched for again"


def test_launches_that_cannot_be_queued_are_called_so() -> None:
    cuda = FakeCuda(0.0)
    clock = QueueClock(cuda)

    def synchronising() -> None:
        cuda.launch(0.002)
        cuda.synchronize()
        cuda.host += 0.1

    assert clock.microseconds([synchronising] * 10) > 50
    assert clock.name == "launch-bound"
    before = len(cuda.sleeps)
    clock.microseconds([synchronising] * 10)
    assert len(cuda.sleeps) == before + 10 and cuda.sleeps[-1] == QueueClock.FIRST_SLEEP, "not searched for again"


def test_a_slow_function_is_launched_few_times_until_the_sleep_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(host_cost=2.0)
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: cuda.host / 1e3)
    clock = QueueClock(cuda)
    calls = []

    def launch() -> None:
        calls.append(1)
        cuda.launch(0.002)

    assert round(clock.microseconds([launch] * 10), 3) == 2.0
    assert clock.name == "queue" and len(calls) == 20, "the first try has said what the host needs"


def test_more_launches_than_the_queue_takes_are_timed_in_groups() -> None:
    cuda = FakeCuda(0.001, queue_length=300)
    clock = QueueClock(cuda)
    calls = []

    def launch() -> None:
        calls.append(1)
        cuda.launch(0.002)

    assert round(clock.microseconds([launch] * 1000), 3) == 2.0
    assert clock.name == "queue"
    calls.clear()
    assert round(clock.microseconds([launch] * 1000), 3) == 2.0
    assert len(calls) == 1000, "every launch once"


def test_the_host_clock_divides_by_the_number_of_launches() -> None:
    calls: list[int] = []
    clock = HostClock()
    assert clock.microseconds([lambda: calls.append(1)] * 4) == clock.host_us > 0
    assert len(calls) == 4
