"""What pytest is given for a run of another project's tests: models fused or not, and a report of every test.

Options `--outer-report FILE` (written when the run ends, JSON) and `--outer-patched`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

_outcomes: dict[str, str] = {}  # test -> "passed", "failed" or "skipped", the worst of its parts
_calls = {"packed": 0, "others": 0}
_RANKS = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("outer tests")
    group.addoption("--outer-report", type=Path, required=True, help="file for the outcomes")
    group.addoption("--outer-patched", action="store_true", help="fuse all models that transformers makes")


def pytest_configure(config: pytest.Config) -> None:
    """Patches before the tests are imported."""
    if not config.getoption("--outer-patched"):
        return
    import bert_fast
    from bert_fast.huggingface.models import FusedModel

    _count(FusedModel, "encode", "packed")
    _count(FusedModel, "_theirs", "others")
    bert_fast.patch_transformers()


def _count(cls: Any, name: str, what: str) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[what] += 1
        return original(*args, **kwargs)

    setattr(cls, name, counted)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of set-up, call and tear-down, and of subtests, the worst counts."""
    before = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = max(before, report.outcome, key=_RANKS.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that failed."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the report."""
    found = {"outcomes": _outcomes, "calls": _calls}
    session.config.getoption("--outer-report").write_text(json.dumps(found), encoding="utf-8")
