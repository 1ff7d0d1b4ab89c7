"""pytest plugin of `make gpu`: the most important GPU tests first, and a line for each test as soon as it is through.

    python -m pytest -p benchmarks.gpu.pytest_plugin --gpu-run FILE -m gpu tests/...        (FILE: see `run.py`)

A report that pytest writes at its end would be lost with a run that is killed.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.run import Run

DTYPES = ("bfloat16", "bf16", "float16", "fp16")  # what training uses comes first; the rest is fp32
WIDTHS = re.compile(r"\b(768|1024|30522)\b")  # hidden sizes and vocabulary of BERT


def in_order(names: list[tuple[str, str]]) -> list[int]:
    """Order of tests, given (file, name and parameters): bf16, fp16, fp32; BERT's widths before others; files in turn.

    So a run that is cut short has seen every family in the dtype and the widths that matter most.
    """
    seen: dict[tuple[int, str], int] = defaultdict(int)
    keys = []
    for index, (file, test) in enumerate(names):
        rank = 2 * next((i // 2 for i, dtype in enumerate(DTYPES) if dtype in test), 2)
        rank += WIDTHS.search(test) is None
        keys.append((rank, seen[rank, file], index))
        seen[rank, file] += 1
    return [key[2] for key in sorted(keys)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-run", type=Path, help="file that describes the run of `make gpu`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By parameters too: pytest names a dtype by its place in the list ("dtype2").
    order = in_order([(str(i.path), f"{i.name} {getattr(i, 'callspec', i).__dict__.get('params')}") for i in items])
    items[:] = [items[i] for i in order]


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-run")
    if path is not None and not hasattr(config, "workerinput"):  # with several processes, the first one writes
        config.pluginmanager.register(_Lines(Run.read(path)))


class _Lines:
    def __init__(self, run: Run) -> None:
        self._recorder = run.recorder
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration
        # A test counts once: as it ended its call, or where setup or teardown ended it otherwise.
        if report.when == "call" or report.outcome != "passed":
            message = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
            seconds = round(self._seconds[report.nodeid], 2)
            self._recorder.write("test", test=report.nodeid, outcome=report.outcome, seconds=seconds, message=message)
