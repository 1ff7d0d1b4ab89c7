"""Packages: what a wheel may hold and need, and what an installation without a compiler is."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from bert_fast import native
from tools import wheels

ROOT = Path(__file__).resolve().parents[2]


def set_up(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`setup.py` of the project, with nothing but the given variables, writing into tmp_path alone."""
    environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ} | variables
    environment["PYTHONWARNINGS"] = "ignore"  # setuptools would rather not be called this way
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What an installation where no compiler is on PATH makes: the wheel, and all that was said."""
    path = tmp_path_factory.mktemp("pure")
    (path / "bin").mkdir()
    build = ("build", "-b", str(path / "build"), "bdist_wheel", "-b", str(path / "tree"), "-d", str(path / "dist"))
    result = set_up(path, *build, PATH=str(path / "bin"))
    assert result.returncode == 0, result.stderr
    (wheel,) = (path / "dist").iterdir()
    return wheel, result.stdout + result.stderr


def test_without_a_compiler_the_wheel_is_pure_python(pure_wheel: tuple[Path, str]) -> None:
    wheel, said = pure_wheel
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheels.problems_of(wheel) == []
    assert "WITHOUT its C++ extension: no C++ compiler found" in said and "apt-get install g++" in said
    assert "CMake" not in said and len(said.strip().splitlines()) < 12


def test_a_wheel_without_extension_works_and_says_why_it_has_none(pure_wheel: tuple[Path, str], tmp_path: Path) -> None:
    with zipfile.ZipFile(pure_wheel[0]) as archive:
        archive.extractall(tmp_path)
    code = (
        # Not by way of the sources, which the package is installed from here.
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if not f.__module__.startswith('__editable__')];"
        "import bert_fast; from bert_fast import native; print(bert_fast.__file__, native.unavailable_reason());"
        "print(bert_fast.BertTokenizer(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a'])('a')['input_ids'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    first, second = result.stdout.splitlines()
    assert first.startswith(str(tmp_path)) and "not built when bert_fast was installed: no C++ compiler" in first
    assert second == "[2, 5, 3]"


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({"CXX": "false", "PATH": os.defpath}, 0, "false compiles no C++17 here"),
        ({"CXX": "no-such-compiler"}, 0, "no C++ compiler found (looked for no-such-compiler)"),
        ({"CXX": "no-such-compiler", "BERT_FAST_NATIVE": "1"}, 1, "BERT_FAST_NATIVE=1, but no C++ compiler found"),
        ({"BERT_FAST_NATIVE": "0"}, 0, "switched off by BERT_FAST_NATIVE=0"),
    ],
    ids=["a compiler that fails", "none", "none, insisted on", "switched off"],
)
def test_what_is_said_where_there_is_no_extension(
    tmp_path: Path, variables: dict[str, str], status: int, says: str
) -> None:
    result = set_up(tmp_path, **variables)
    assert result.returncode == status and says in result.stderr, result.stderr


@pytest.mark.skipif(sys.platform != "linux" or native.load() is None, reason="needs the extension, an ELF file")
def test_the_extension_links_no_torch() -> None:
    extension = native.load()
    assert extension is not None and extension.__file__ is not None
    libraries = wheels.needed(Path(extension.__file__))
    assert libraries and not [name for name in libraries if not wheels.ALLOWED.match(name)]


def test_what_is_wrong_with_a_wheel_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / "bert_fast-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        extension = f"bert_fast/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        archive.writestr(extension, Path(sys.executable).read_bytes())
        archive.writestr("bert_fast/testing/x.py", "")
        archive.writestr("bert_fast-1.dist-info/METADATA", "Requires-Dist: torch==2.13.0\n")
    found = "\n".join(wheels.problems_of(wheel))
    assert all(text in found for text in ("testing/x.py: not for users", "the tag does not say", "no range of torch"))
    for name in ("libtorch_cpu.so", "libc10.so", "libtorch_python.so"):
        assert not wheels.ALLOWED.match(name)
