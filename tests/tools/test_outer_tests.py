"""Other projects' tests, untouched and fused: here a project of few tests, one of which sees the difference."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kit.markdown import page_with
from tools.outer_tests import common_cases, plugin, report, stand_ins
from tools.outer_tests.__main__ import compare, folder_of, main

pytest.importorskip("transformers", reason="the package transformers is not installed")

TESTS = """
import pytest
import torch
from transformers import BertConfig, BertModel


def model():
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return BertModel(config).eval()


def test_forward():
    assert model()(torch.arange(6).view(2, 3)).last_hidden_state.shape == (2, 3, 16)


def test_attentions():
    assert model()(torch.arange(6).view(2, 3), output_attentions=True).attentions is not None


def test_compiled():
    compiled = torch.compile(model(), fullgraph=True, backend="eager")
    for length in (2, 3):
        assert compiled(torch.arange(2 * length).view(2, length)).last_hidden_state.shape == (2, length, 16)


def test_what_is_not_there():
    from transformers.activations import no_such_name

    with pytest.raises(NotImplementedError, match="activations:no_such_name is not in the installed version"):
        no_such_name(3)


def test_of_another_family():
    from transformers import BertForMaskedLM
    from transformers.models.bert.modeling_bert import BertLayer

    assert (BertForMaskedLM.__name__, BertLayer.__name__) == ("ElectraForMaskedLM", "ElectraLayer")


def test_class_is_their_own():
    assert "Fused" not in str(type(model()).__mro__)


def test_of_nothing():
    assert False
"""


def test_both_runs_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_theirs.py").write_text(TESTS)
    (folder / "test_unreadable.py").write_text("import no_such_module")
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(report, "RECORD", record)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds of both runs
    absent, instead = "--outer-absent=transformers.activations:no_such_name", "--outer-instead=Bert:Electra"
    assert main([str(folder), "--record", "theirs 1.0", "--continue-on-collection-errors", absent, instead]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["untouched", "8", "6", "2", "0", "0", "0"]
    name, run, passed, failed, skipped, packed, others = lines[2].split()
    assert (name, run, passed, failed, skipped, others) == ("fused", "8", "5", "3", "0", "1")
    assert int(packed) >= 2, "one as it is, and at least one that is compiled"
    assert lines[3:] == [
        "tests with packed calls: 2",
        "not packed:      1 calls: output_attentions: probabilities are asked for",
        "not read: tests/test_unreadable.py: E   ModuleNotFoundError: No module named 'no_such_module'",
        "fails only fused: tests/test_theirs.py::test_class_is_their_own",
    ]
    (line,) = report.lines(record)
    assert line["untouched"] == {"passed": 6, "failed": 2, "skipped": 0} and line["packed_tests"] == 2
    assert line["paths"] == ["tests"] and line["options"] == ["--continue-on-collection-errors", absent, instead]
    rendered = report.tables(record)
    assert "| theirs 1.0 | transformers " in rendered["runs"] and "test_class_is_their_own" in rendered["differences"]
    run = {
        "outcomes": {"test_a": "passed"},
        "calls": {"packed": 1, "others": 0},
        "packed": {"test_a": 1},
        "reasons": {},
    }
    both = dict.fromkeys(("untouched", "fused"), run | {"versions": line["installed"]})
    report.store("theirs 1.0", ["tests"], [instead], both, [], [])
    assert [line["fails_only_fused"] for line in report.lines(record)] == [[]], "the newest line counts"


def test_common_tests_of_a_family_run_on_all_of_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Any = ModuleType("tests.test_modeling_common")
    theirs.ModelTesterMixin = type("ModelTesterMixin", (), {"_prepare_for_class": lambda _, inputs, cls, want: inputs})
    theirs.ids_tensor = lambda shape, count: torch.arange(shape[0] * shape[1]).view(shape) % count
    theirs.random_attention_mask = lambda shape: torch.ones(shape, dtype=torch.long)
    monkeypatch.setitem(sys.modules, "tests.test_modeling_common", theirs)
    monkeypatch.setattr(common_cases, "_ABSENT", {"tests.nowhere.at_all": {"some": 3}})
    files = common_cases.write(tmp_path, ["Electra", "Bert"])
    other, tests = (runpy.run_path(str(file))["ModelTest"] for file in files)
    assert (other.__name__, other.all_model_classes[1].__name__) == ("ElectraTest", "ElectraForMaskedLM")
    assert importlib.import_module("tests.nowhere.at_all").some == 3
    assert [cls.__name__ for cls in tests.all_model_classes][::6] == ["BertModel", "BertForPreTraining"]
    test = tests()
    test.setUp()
    config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
    assert config.to_dict() == test.model_tester.get_config().to_dict() and int(inputs["input_ids"].min()) == 2
    pretraining = tests.all_model_classes[6]
    loss = pretraining(config)(**test._prepare_for_class(inputs, pretraining, True)).loss
    assert loss is not None and "labels" not in test._prepare_for_class(inputs, tests.all_model_classes[0], True)


def test_the_page_shows_what_is_stored() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert page_with(page, report.tables()) == page, "run `python -m tools.outer_tests --tables --write`"


def test_stand_ins_are_found_by_name(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", minversion="6")
    pytest.importorskip("datasets")
    names = "sentence-transformers-testing/stsb-bert-tiny-safetensors", "peft-internal-testing/tiny-random-RobertaModel"
    monkeypatch.setattr(stand_ins, "MODELS", {name: stand_ins.MODELS[name] for name in names})
    stand_ins.make(tmp_path)
    code = f"""if True:
        import datasets, sentence_transformers, transformers
        model = sentence_transformers.SentenceTransformer("{names[0]}")
        assert model.encode(["a short text"]).shape == (1, 128) and len(model.tokenizer) == 30522
        assert type(transformers.AutoModel.from_pretrained("{names[1]}")).__name__ == "RobertaModel"
        tokenizer = transformers.AutoTokenizer.from_pretrained("{names[1]}")
        assert tokenizer.decode(tokenizer("of it").input_ids) == "<s>of it</s>"
        assert datasets.load_dataset("sentence-transformers/stsb")["test"].num_rows == 100
    """
    variables = {"HF_HUB_OFFLINE": "1", **stand_ins.environment(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True)


def test_what_is_worse_and_what_is_better() -> None:
    untouched = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "passed"}
    fused = {"a": "failed", "b": "passed", "c": "skipped", "d": "failed"}
    assert compare(untouched, fused) == (["a", "e"], ["b"])


def test_pytest_runs_where_the_project_does(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "tests"
    folder.mkdir(parents=True)
    assert folder_of(folder / "test_a.py") == tmp_path
    assert folder_of(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Bert", "expected ASKED:GIVEN, as Roberta:XLMRoberta, got Bert"),
        ("Bert:No", "transformers has no class NoModel"),
    ],
    ids=["no colon", "no such family"],
)
def test_families_that_are_not_there_are_named(given: str, said: str) -> None:
    found: dict[str, object] = {"--outer-absent": [], "--outer-instead": given}
    config = SimpleNamespace(getoption=found.__getitem__)
    with pytest.raises(pytest.UsageError, match=f"--outer-instead: {said}"):
        plugin.pytest_configure(config)  # type: ignore[arg-type]


def test_a_path_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "paths: there is no" in capsys.readouterr().err
