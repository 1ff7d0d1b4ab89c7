"""Faults made on purpose, by which the tests see that the fuzzer finds what it is for."""

import os
import signal
import threading
from collections.abc import Callable

from .case import Case


def _hang(text: str) -> None:
    while True:
        pass


def _wait(text: str) -> None:
    threading.Lock().acquire()
    threading.Event().wait()


def _crash(text: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _index_error(text: str) -> None:
    raise IndexError("text: list index out of range")


def _decode_error(text: str) -> None:
    b"\xff".decode()


def _unnamed(text: str) -> None:
    raise ValueError("expected something else")


def _blow_up(text: str) -> None:
    bytearray(1 << 40)


def _refuse(text: str) -> None:
    raise ValueError(f"text: expected another, got {text!r}")


def _wrong_result(text: str) -> str:
    return text[:-1]


def _exit(text: str) -> None:
    raise SystemExit(3)


# The case numbered 100 * n makes the n-th.
FAULTS: dict[str, Callable[[str], object]] = {
    "refuses": _refuse,
    "hangs": _hang,
    "crashes": _crash,
    "raises IndexError": _index_error,
    "raises a subclass": _decode_error,
    "names nothing": _unnamed,
    "takes all memory": _blow_up,
    "lies": _wrong_result,
    "exits": _exit,
}


def run(case: Case) -> None:
    """Makes the fault that the number names."""
    fault = list(FAULTS.values())[case.number // 100 % len(FAULTS)]
    case.expect(case.call(fault, "abc") == "abc", "the text came back as another")
