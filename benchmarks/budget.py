"""Cases one after the other, for as long as there is time."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["Seconds"]

AnyCase = TypeVar("AnyCase")


class Seconds:
    """The time a part has; leaves no case half done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def of(self, cases: list[AnyCase], leave_out: Callable[[AnyCase, str], None]) -> Iterator[AnyCase]:
        """Yields cases as long as one that takes as long as the longest so far would still fit; says how far it is."""
        times: list[float] = []
        for case in cases:
            start = time.monotonic()
            if start + max(times, default=0.0) > self._end:
                leave_out(case, "no time left in this part")
                continue
            yield case
            now = time.monotonic()
            times.append(now - start)
            rest = (len(cases) - len(times)) * sum(times) / len(times)
            left = self._end - now
            text = f"{len(times)} of {len(cases)} cases; the rest needs about {rest:.0f} s, {left:.0f} s are left"
            print(text, flush=True)
