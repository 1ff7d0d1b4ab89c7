"""CI's share of the fuzzer, and tests that it finds what it is for."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from bert_fast.errors import CheckpointError
from tests.process_server import run

from .planted import FAULTS
from .rules import argument_names, objection
from .surfaces import SURFACES, numbers_of, surface_named, surface_of

# Surfaces that share a process, so that workers of the test run share the time.
GROUPS = {
    "ops": ("registered ops",),
    "files": ("model files", "configurations", "fused models"),
    "runs": ("resumed runs", "commands"),
    "calls": ("ops", "modules", "models", "optimizers"),
    "tokenizers": ("tokenizer", "tokenizer calls", "tokenizer files"),
    "data": ("examples", "text sources", "collators", "training arguments", "token stores"),
}


def fuzz(*arguments: str) -> tuple[int, str]:
    """The exit status and what was printed; in a fresh process, from which forks are safe."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(command_line, arguments, folder=Path(folder))
    assert not done.stderr.startswith("Traceback"), done.stderr
    return done.returncode, done.stdout


def command_line(arguments: tuple[str, ...]) -> None:
    """As `python -m tests.fuzzing` with these arguments."""
    from .__main__ import main

    sys.argv[1:] = arguments
    sys.exit(main())


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_no_crash_no_hang_and_every_refusal_names_what_is_wrong(group: str) -> None:
    surfaces = GROUPS[group]
    status, output = fuzz(*(word for name in surfaces for word in ("--surface", name)))
    assert status == 0, output
    count = sum(surface_named(name).in_ci for name in surfaces)
    assert f"{count} cases, 0 findings" in output


def test_every_surface_is_in_a_group() -> None:
    assert {name for group in GROUPS.values() for name in group} == {one.name for one in SURFACES if one.in_ci}


# --- the fuzzer itself ------------------------------------------------------------------------------------------------

EXPECTED = {
    "hangs": r"hangs: more than 0.5 seconds of processor time",
    "crashes": r"crash: SIGSEGV",
    "raises IndexError": r"IndexError where",
    "raises a subclass": r"UnicodeDecodeError where",
    "names nothing": r"ValueError that names no argument and no file",
    "takes all memory": r"MemoryError where",
    "lies": r"the text came back as another",
    "exits": r"SystemExit where",
}


@pytest.fixture(scope="module")
def planted() -> str:
    status, output = fuzz("--surface", "planted faults", "--cases", str(len(FAULTS)))
    assert status == 1
    return output


def test_finds_all_planted_faults_and_nothing_else(planted: str) -> None:
    found = dict(re.findall(r"^case (\d+) \(planted faults\): (.*)$", planted, re.MULTILINE))
    numbers = dict(zip(FAULTS, numbers_of(surface_named("planted faults"), 0, len(FAULTS)), strict=True))
    assert set(found) == {str(numbers[name]) for name in EXPECTED}
    for name, what in EXPECTED.items():
        assert re.match(what, found[str(numbers[name])])
    assert f"{len(FAULTS)} cases, {len(EXPECTED)} findings" in planted


def test_poor_refusals_are_counted_apart_where_they_are_accepted() -> None:
    _, output = fuzz("--surface", "planted faults", "--cases", str(len(FAULTS)), "--accept-poor-refusals")
    found = set(re.findall(r"^case (\d+) ", output, re.MULTILINE))
    numbers = dict(zip(FAULTS, numbers_of(surface_named("planted faults"), 0, len(FAULTS)), strict=True))
    assert found == {str(numbers[name]) for name in ("hangs", "crashes", "takes all memory", "lies", "exits")}
    assert "poor refusal 3" in output


def test_a_finding_prints_the_calls_that_led_to_it(planted: str) -> None:
    assert "_crash('abc')\n    Fatal Python error: Segmentation fault" in planted


def test_one_integer_makes_the_same_case_again() -> None:
    number = str(numbers_of(surface_named("ops"), 5, 1)[0])
    (status, first), (_, second) = fuzz("--case", number), fuzz("--case", number)
    assert first == second and first.startswith(f"# case {number}: ops\n") and status == 0


def test_numbers_name_their_surface() -> None:
    for surface in SURFACES:
        assert all(surface_of(number) is surface for number in numbers_of(surface, 7, 3))


def takes(text: str, k: int) -> None:
    """Has arguments."""


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        pytest.param(ValueError("text: expected another"), True, id="argument"),
        pytest.param(ValueError("the text is another"), True, id="argument-in-a-sentence"),
        pytest.param(ValueError("texts: expected another"), False, id="another-argument"),
        pytest.param(ValueError("k: expected another"), True, id="short-name"),
        pytest.param(ValueError("k is another"), False, id="short-name-in-a-sentence"),
        pytest.param(TypeError("takes() missing 1 required positional argument: 'k'"), True, id="binding"),
        pytest.param(TypeError("'int' object is not iterable"), False, id="unnamed"),
        pytest.param(FileNotFoundError(2, "No such file or directory", "a.txt"), True, id="file"),
        pytest.param(OSError("broken"), False, id="file-unnamed"),
        pytest.param(CheckpointError("text: broken"), True, id="of-the-library"),
        pytest.param(RuntimeError("text: broken"), False, id="runtime-error"),
        pytest.param(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "text:"), False, id="subclass"),
        pytest.param(KeyError("text"), False, id="key-error"),
    ],
)
def test_what_counts_as_a_refusal(error: Exception, fits: bool) -> None:
    assert (objection(error, argument_names(takes)) is None) == fits
