"""A plugin for pytest, `-p tools.other_clock`: Python's clock is more than a year ahead."""

import time

AHEAD_S = 400 * 86_400 + 12_345

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + AHEAD_S
time.time_ns = lambda: _time_ns() + AHEAD_S * 10**9
