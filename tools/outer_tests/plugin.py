"""What pytest is given for a run of another project's tests: models fused or not, and a report of every test.

Options `--outer-report FILE` (written when the run ends, JSON), `--outer-patched`, and `--outer-absent MODULE:NAME`,
for a name that the tests import and the installed version lacks: what uses it fails, fused or not. `--outer-instead
Roberta:XLMRoberta` gives tests that ask transformers for classes of the first name those of the second: for a family
of the same form that has no tests of its own.

The report counts calls of fused models: packed ones, and by reason those that transformers' code ran. A model that
torch.compile traces counts when it is traced, not when the program runs.
"""

import functools
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_RANKS = ("passed", "skipped", "failed")
_PACKAGES = ("transformers", "sentence_transformers", "peft", "torch")  # whose versions are reported, if imported
_outcomes: dict[str, str] = {}  # test -> "passed", "failed" or "skipped", the worst of its parts
_packed: Counter[str] = Counter()  # test -> calls that were packed
_others: Counter[str] = Counter()  # reason -> calls that were not; one with several reasons counts for each
_calls: Counter[str] = Counter()  # "packed", "others"
_running = ["collection"]  # the test that runs
_patches: list[Any] = []
_unread: list[str] = []  # files that could not be imported, and why


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("outer tests")
    group.addoption("--outer-report", type=Path, required=True, help="file for the outcomes")
    group.addoption("--outer-patched", action="store_true", help="fuse all models that transformers makes")
    group.addoption(
        "--outer-absent", action="append", default=[], help="MODULE:NAME that tests import and is not there"
    )
    group.addoption("--outer-instead", default="", help="ASKED:GIVEN, how the names of two families' classes begin")


def pytest_configure(config: pytest.Config) -> None:
    """Patches before the tests are imported, and counts."""
    for absent in config.getoption("--outer-absent"):
        module, _, name = absent.partition(":")
        theirs = importlib.import_module(module)
        if hasattr(theirs, name):
            raise pytest.UsageError(f"--outer-absent: {absent} is there")
        setattr(theirs, name, functools.partial(_raise_absent, absent))
    if instead := config.getoption("--outer-instead"):
        asked, _, given = instead.partition(":")
        if not asked or not given:
            raise pytest.UsageError(f"--outer-instead: expected ASKED:GIVEN, as Roberta:XLMRoberta, got {instead}")
        _give_instead(asked, given)
    if not config.getoption("--outer-patched"):
        return
    import torch

    import bert_fast
    from bert_fast.huggingface.models import FusedModel

    _observe(FusedModel, "encode", torch._dynamo.assume_constant_result(_count_packed))
    _observe(FusedModel, "_theirs", _count_other)
    _patches.append(bert_fast.patch_transformers())


def pytest_collection_finish() -> None:
    """Patches once more, for models of sentence-transformers, which the tests import."""
    if _patches and "sentence_transformers" in sys.modules:
        import bert_fast

        _patches.pop().undo()
        _patches.append(bert_fast.patch_transformers())


def _give_instead(asked: str, given: str) -> None:
    """Those of another family under the names of one's classes, in transformers and in the module of the first."""
    import transformers

    for one in (asked, given):
        if not hasattr(transformers, f"{one}Model"):
            raise pytest.UsageError(f"--outer-instead: transformers has no class {one}Model")
    module, others = (sys.modules[getattr(transformers, f"{one}Model").__module__] for one in (asked, given))
    transformers = sys.modules["transformers"]  # another than was imported, after the first class
    found = {f"{asked}Config": getattr(transformers, f"{given}Config")}
    for name, own in list(vars(module).items()):
        other = getattr(others, given + name.removeprefix(asked), None)
        if name.startswith(asked) and isinstance(own, type) and isinstance(other, type):
            found[name] = other
    for name, other in found.items():
        setattr(transformers, name, other)
        setattr(module, name, other)


def _raise_absent(absent: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{absent} is not in the installed version")


def _observe(cls: Any, name: str, noted: Callable[..., None]) -> None:
    """Calls `noted` before every call of a method: with its positional arguments, or none where it takes none."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted(*args)
        return original(self, *args, **kwargs)

    setattr(cls, name, observed)


def _count_packed() -> None:
    _calls["packed"] += 1
    _packed[_running[0]] += 1


def _count_other(*args: Any) -> None:
    import torch

    if torch.compiler.is_dynamo_compiling():  # which has its own reasons for what it cannot trace
        return
    _calls["others"] += 1
    for reason in {re.sub(r"\.\d+\b", ".N", reason) for reason in args[-1]}:
        _others[reason] += 1


def pytest_runtest_logstart(nodeid: str) -> None:
    """Calls from here on are of this test."""
    _running[0] = nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of set-up, call and tear-down, and of subtests, the worst counts."""
    before = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = max(before, report.outcome, key=_RANKS.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that failed."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"
        _unread.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the report."""
    found = {
        "outcomes": _outcomes,
        "calls": {"packed": _calls["packed"], "others": _calls["others"]},
        "packed": dict(_packed),
        "reasons": dict(_others.most_common()),
        "unread": _unread,
        "versions": {name: getattr(sys.modules[name], "__version__", "") for name in _PACKAGES if name in sys.modules},
    }
    session.config.getoption("--outer-report").write_text(json.dumps(found), encoding="utf-8")
