"""The reference: docstrings of public names say what goes in and comes out, and their examples run as printed."""

import doctest
import importlib
import inspect
import pathlib
import re
import tempfile
from typing import Any

import pytest
import torch

import bert_fast
from tools.site.public_names import PARTS, public_names


def public_objects() -> dict[str, Any]:
    """Functions and classes by the names that users import them by, each once."""
    found: dict[int, tuple[str, Any]] = {}
    for part in PARTS:
        if part.module == "bert_fast.training":
            pytest.importorskip("transformers", minversion="5")
            pytest.importorskip("accelerate")
        module = importlib.import_module(part.module)
        for name in public_names(part):
            value = getattr(module, name.name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(id(value), (name.path, value))
    return dict(found.values())


def examples_of(path: str, value: Any) -> list[doctest.DocTest]:
    names = {
        "torch": torch, "bert_fast": bert_fast, "BertConfig": bert_fast.BertConfig, "tempfile": tempfile,
        "pathlib": pathlib,
    }  # fmt: skip
    for part in PARTS[1:]:
        names[part.module.rpartition(".")[2]] = importlib.import_module(part.module)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, path, None, None)
    return [test] if test.examples else []


def has_section(value: Any, *titles: str) -> bool:
    return re.search(rf"^(?:{'|'.join(titles)}):$", inspect.getdoc(value) or "", re.MULTILINE) is not None


def parameters_of(value: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in inspect.signature(value).parameters.values() if one.kind not in kinds]


@pytest.mark.filterwarnings("ignore")
def test_examples_run_as_printed() -> None:
    pytest.importorskip("transformers", minversion="5")
    torch.set_num_threads(1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    count = 0
    for path, value in public_objects().items():
        if path == "bert_fast.XLMRobertaTokenizer" and bert_fast.native.load() is None:
            continue  # it needs the C++ extension
        for test in examples_of(path, value):
            count += 1
            runner.run(test, out=report.append)
    assert not report, "".join(report)
    assert count >= 60


def functions() -> dict[str, Any]:
    return {path: value for path, value in public_objects().items() if inspect.isfunction(value)}


def test_every_public_function_has_an_example() -> None:
    found = functions()
    assert len(found) >= 49
    assert not [path for path, value in found.items() if not examples_of(path, value)]


def test_every_public_function_describes_its_arguments_and_its_result() -> None:
    for path, value in functions().items():
        entries = re.findall(r"^    \*{0,2}(\w+)(?: \(.*\))?: ", _section(value, "Args"), re.MULTILINE)
        assert set(parameters_of(value)) <= set(entries) <= set(inspect.signature(value).parameters), path
        assert not re.search(r"^(Args|Returns|Raises): ", inspect.getdoc(value) or "", re.MULTILINE), path
        result = str(inspect.signature(value).return_annotation)
        assert result == "None" or "Iterator" in result or has_section(value, "Returns"), f"{path}: no Returns"


def _section(value: Any, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", (inspect.getdoc(value) or "") + "\n", re.MULTILINE)
    return found[1] if found else ""
