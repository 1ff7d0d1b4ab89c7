"""pytest plugin of `make gpu`: the most important GPU tests first, and a line for each test as soon as it is through.

    python -m pytest -p benchmarks.gpu.pytest_plugin --gpu-run FILE --gpu-progress FILE -m gpu tests/...

(FILE of the run: see `run.py`.) A report that pytest writes at its end would be lost with a run that is killed.
A test that leaves the device unusable ends its process: of several, xdist starts another; of one, the driver does, and
that one leaves out what the file of progress names.
"""

import re
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.run import Run
from benchmarks.kit.crashes import Progress, is_usable, leave

# Whole models, captured steps and masks: what a fault anywhere shows in, so before all that looks at one kernel.
FIRST = ("tests/parity/test_any_device.py", "tests/test_graphs.py", "tests/ops/test_masks.py")
DTYPES = ("bfloat16", "bf16", "float16", "fp16")  # what training uses comes first; the rest is fp32
WIDTHS = re.compile(r"\b(768|1024|30522)\b")  # hidden sizes and vocabulary of BERT


def in_order(names: list[tuple[str, str]]) -> list[int]:
    """Order of tests, given (file, name and parameters): FIRST; bf16, fp16, fp32; BERT's widths before others; files
    in turn.

    So a run that is cut short has seen every family in the dtype and the widths that matter most.
    """
    seen: dict[tuple[int, str], int] = defaultdict(int)
    keys = []
    for index, (file, test) in enumerate(names):
        rank = 2 * next((i // 2 for i, dtype in enumerate(DTYPES) if dtype in test), 2)
        rank += WIDTHS.search(test) is None
        rank -= 100 * (Path(file).as_posix().endswith(FIRST))
        keys.append((rank, seen[rank, file], index))
        seen[rank, file] += 1
    return [key[2] for key in sorted(keys)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-run", type=Path, help="file that describes the run of `make gpu`")
    parser.addoption("--gpu-progress", type=Path, help="file of the tests that were begun")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    begun = set(_progress(config).begun())
    # By parameters too: pytest names a dtype by its place in the list ("dtype2").
    order = in_order([(str(i.path), f"{i.name} {getattr(i, 'callspec', i).__dict__.get('params')}") for i in items])
    items[:] = [items[i] for i in order if items[i].nodeid not in begun]


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-run")
    if path is None:
        return
    run = Run.read(path)
    config.pluginmanager.register(_Leaves(torch.device(run.device), _progress(config)))
    if not hasattr(config, "workerinput"):  # with several processes, the first one writes
        config.pluginmanager.register(_Lines(run))


def _progress(config: pytest.Config) -> Progress:
    """Of this process. With several there is none: each has to collect the same tests, and xdist knows what is left."""
    is_one_of_several = hasattr(config, "workerinput") or config.getoption("numprocesses", None)
    return Progress(None if is_one_of_several else config.getoption("--gpu-progress"))


class _Leaves:
    """Ends the process behind a test after which the device no longer answers."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device, self._progress = device, progress

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._progress.begin(item.nodeid)
        result = yield
        if not is_usable(self._device):
            leave()
        self._progress.end(item.nodeid)
        return result


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
