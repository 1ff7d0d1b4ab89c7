"""The command `bert-fast` itself; the subcommands have tests of their own."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys

import pytest

from bert_fast._version import __version__
from bert_fast.cli import doctor, main
from bert_fast.errors import BackendError
from bert_fast.training.tasks import TASKS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == f"bert_fast {__version__}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-command"], "no command no-such-command; see bert-fast --help"),
        (["bnech"], "no command bnech; did you mean bench?; see bert-fast --help"),
        (["--versoin"], "no flag --versoin; did you mean --version?"),
        (["doctor", "--no-such-option"], "no flag --no-such-option"),
        (["doctor", "extra"], "unrecognized arguments: extra"),
        (["bench", "--secnds", "4"], "no flag --secnds; did you mean --seconds?"),
        (["tokenize", "--tokeniser=x"], "no flag --tokeniser; did you mean --tokenizer?"),  # before what is missing
        (["tokenize", "x", "--out", "y"], "one of the arguments --tokenizer --vocab is required"),
    ],
)
def test_wrong_arguments_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(argv)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: bert-fast") and error.endswith(f" error: {message}\n")


@pytest.mark.parametrize("argv", [[], ["--version"], ["--help"]], ids=" ".join)
def test_questions_about_the_command_import_no_torch(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of the program that is installed, bert_fast_command.py."""
    command = [sys.executable, "-X", "importtime", "-m", "bert_fast_command", *argv]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    with contextlib.suppress(SystemExit):
        main.main(argv)
    assert result.stdout == capsys.readouterr().out
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "numpy", "transformers"}


def test_the_program_runs_commands() -> None:
    command = [sys.executable, "-m", "bert_fast_command", "doctor", "--json"]
    assert '"ok": true' in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_arguments_it_shows_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    shown = capsys.readouterr().out
    examples = [line.split()[1] for line in shown.splitlines() if line.strip().startswith("bert-fast ")]
    assert len(examples) >= 5 and set(examples) <= set(main.COMMANDS)
    assert len(shown.splitlines()) < 30


SCREEN = 50  # lines of a terminal window that fills most of a laptop's display
TRAINING_SCREEN = 64  # training has more flags
SHORT = [[name] for name in main.COMMANDS if name != "pretrain"]
LONG = [["pretrain"], *(["finetune", task] for task in TASKS)]


@pytest.mark.parametrize("argv", [[], *SHORT, *LONG], ids=" ".join)
def test_help_fits_a_screen(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each flag once, with what it means."""
    monkeypatch.setenv("COLUMNS", "100")
    status: object = 0
    with contextlib.suppress(SystemExit):  # argparse ends with one
        status = main.main([*argv, "--help"])
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= (TRAINING_SCREEN if argv in LONG else SCREEN)
    assert lines[0].startswith(" ".join(["usage: bert-fast", *argv]))
    helps = re.findall(r"^  -.*?(?:  |\n {10})(.*(?:\n {8,}.*)*)", "\n".join(lines), re.MULTILINE)
    for sentence in (" ".join(text.split()) for text in helps):
        assert sentence[0].isupper() and re.search(r"\.( \[[^\]]+\])?$", sentence), sentence
    assert argv in SHORT[2:4] or helps  # finetune and predict want a word more
    names = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(names) == len(set(names))
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  --"):
            assert len(line.strip().split("  ")) > 1 or after.startswith(" " * 8), f"no help: {line}"
    if argv in LONG:
        assert {"--learning_rate", "--max_seq_length", "--graphs", "--config"} <= set(names)
        assert not {"--bf16_full_eval", "--push_to_hub", "--no_next_sentence", "--learning-rate"} & set(names)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_is_a_module(name: str) -> None:
    module = importlib.import_module(f"bert_fast.cli.{name}")
    assert callable(module.run)
    assert callable(getattr(module, "add_arguments", None)) is (name not in main.TRAINING)


@pytest.mark.parametrize(("error", "status"), [(BackendError("no GPU here"), 1), (KeyboardInterrupt(), 130)])
def test_expected_errors_are_one_line(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main.main(["doctor"]) == status
    assert capsys.readouterr().err == (f"bert-fast doctor: {error}\n" if status == 1 else "")


def test_module_can_be_run() -> None:
    command = [sys.executable, "-m", "bert_fast.cli.main", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in main.COMMANDS)


SHUTDOWN_ABORTS = """
import atexit, os, sys
from bert_fast.cli import main
class Abort:
    def __del__(self, abort=os.abort):
        abort()
abort = Abort()
atexit.register(print, "last words")
main.main = lambda: print("done") or 3
main.command()
"""


@pytest.mark.parametrize(("world_size", "status"), [("2", 3), ("1", -signal.SIGABRT)])
def test_one_of_several_processes_ends_before_python_shuts_down(world_size: str, status: int) -> None:
    environment = os.environ | {"WORLD_SIZE": world_size}
    result = subprocess.run([sys.executable, "-c", SHUTDOWN_ABORTS], capture_output=True, text=True, env=environment)
    assert result.returncode == status
    assert world_size == "1" or result.stdout == "done\nlast words\n"
