"""Gaps between freed tensors go back to the system, now and then."""

import sys

import pytest
import torch

from bert_fast.training import heap
from bert_fast.training.heap import Heap


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_gaps_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if heap._malloc_trim() is None or not sys.platform.startswith("linux"):
        pytest.skip("malloc is not glibc's here")
    clock = Clock()
    kept = Heap(clock)
    # Many tensors, too small to have pages of their own; every other one lives on, so that none lies at the end.
    tensors = [torch.ones(25_000) for _ in range(2000)]
    del tensors[::2]
    before = resident_bytes()
    clock.now += 0.5
    assert not kept.settle(), "not twice within a second"
    clock.now += 0.6
    assert kept.settle()
    assert before - resident_bytes() > 60 * 2**20  # of 95 MB
    assert all(float(tensor[0]) == 1 for tensor in tensors)
    clock.now += 1.5
    assert not kept.settle(), "what is taken again costs time: the more was returned, the later comes the next"
    clock.now += 10
    assert kept.settle()


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    clock = Clock()
    kept = Heap(clock)
    clock.now += 5
    assert not kept.settle()
