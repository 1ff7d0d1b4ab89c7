"""Fixtures of the benchmark tests: a run on the CPU of the fake family's cases."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import parts
from benchmarks.gpu.run import Run
from benchmarks.kit.results import read_lines
from benchmarks.models import flash

FAMILY = "tests.benchmarks.fake_family"


def per_text(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, p: float, scale: float) -> Tensor:
    """What `flash_varlen` computes on a GPU."""
    bounds = cu_seqlens.tolist()
    texts = [[t[begin:end].transpose(0, 1) for t in (q, k, v)] for begin, end in itertools.pairwise(bounds)]
    return torch.cat([scaled_dot_product_attention(*t, dropout_p=p, scale=scale).transpose(0, 1) for t in texts])


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel runs on a GPU alone."""
    monkeypatch.setattr(flash, "flash_varlen", per_text)


class CpuRun:
    """A run as `make gpu` would describe it to its parts, but small and on the CPU."""

    def __init__(self, folder: Path, families: Sequence[str] = (FAMILY,)) -> None:
        self.results = folder / "results.jsonl"
        self.file = folder / "run.json"
        Run(str(self.results), {"run": "this", "gpu": None}, "cpu", "small", "aot_eager", 3, families).write(self.file)

    @property
    def run(self) -> Run:
        return Run.read(self.file)

    def part(self, name: str, seconds: float = 600.0, family: str = FAMILY, progress: Path | None = None) -> int:
        options = [name, "--run", str(self.file), "--family", family, "--until", str(time.monotonic() + seconds)]
        return parts.main([*options, *(() if progress is None else ("--progress", str(progress)))])

    def lines(self, kind: str) -> list[dict[str, Any]]:
        found = read_lines(self.results) if self.results.exists() else ()
        return [line for line in found if line["kind"] == kind]

    def by_variant(self, kind: str) -> dict[str, dict[str, Any]]:
        return {line["case"].rsplit("/", 1)[1]: line for line in self.lines(kind)}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two wait for each other longer than models of this size take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cpu_run(tmp_path: Path) -> CpuRun:
    return CpuRun(tmp_path)


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes an executable shell script into a folder of its own."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write
