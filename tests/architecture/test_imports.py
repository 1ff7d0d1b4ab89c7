"""Imports flow one way. The table below is the rule; every other edge fails."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_fast._requirements import check_torch
from tests.architecture.imports import imported_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bert_fast"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A part is a folder of bert_fast or a file directly in it. part -> the other parts that it may import.
BASE = {
    "_version", "addresses", "batch_invariance", "checks", "devices", "env", "errors", "files", "hub", "native",
    "numerals", "remembered", "storage", "terminal",
}  # fmt: skip
OPS = BASE | {"backend", "reference"}
MODULES = OPS | {"ops"}
MODELS = MODULES | {"modules", "optim"}
HUGGINGFACE = MODELS | {"models", "graphs", "tokenization"}  # a model of texts tokenizes them
DATA = MODELS | {"models", "tokenization", "graphs"}
TRAINING = DATA | {"data"}
BENCH = BASE | {"huggingface"}
CLI = TRAINING | BENCH | {"training", "__init__", "bench"}
ALLOWED = {
    "_requirements": set(),
    "_version": set(),
    "errors": set(),
    "env": set(),
    "files": set(),
    "hub": {"errors"},
    "numerals": set(),
    "terminal": set(),
    "checks": {"errors", "env"},
    "devices": {"env"},
    "batch_invariance": {"errors"},
    "remembered": {"addresses"},
    "storage": {"errors", "env"},
    "native": {"errors", "env"},
    "addresses": {"native"},
    "reference": {"errors", "checks"},
    "torch": BASE | {"reference"},
    # Kernels stand beside it, not on it; `backend` alone reaches both, by name (see the test of dynamic imports).
    "triton": BASE | {"reference"},
    "backend": BASE,
    "ops": OPS,
    "modules": MODULES,
    "optim": MODULES,
    "models": MODELS,
    "huggingface": HUGGINGFACE,
    "graphs": MODELS,
    "losses": MODULES,
    "warming": MODELS | {"models"},
    "tokenization": BASE | {"reference"},
    "data": DATA,
    "training": TRAINING,
    "bench": BENCH,
    "cli": CLI,
    "__main__": CLI | {"cli"},
    # For tests and benchmarks: may import all, and nothing imports it.
    "testing": CLI | {"torch", "triton", "cli"},
    # Re-exports of the public API.
    "__init__": DATA | {"data", "huggingface", "warming"} | {"_requirements", "training", "losses"},
}

# Packages that a part may import beyond the standard library, torch and what torch itself requires for typing.
ALLOWED_PACKAGES = {
    "reference": set(),
    "triton": {"triton"},
    "tokenization": {"numpy"},
}
EVERYWHERE = {"torch", "typing_extensions", "__future__"}
# The exception: the tokenizer's oracle has the interface of the C++ class, which returns NumPy arrays.
PACKAGE_EXCEPTIONS = {("reference/wordpiece.py", "numpy"), ("reference/wordpiece_rows.py", "numpy")}


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def target_part(name: str) -> str:
    """The part that a dotted name of bert_fast belongs to; names that `bert_fast/__init__.py` holds are its own."""
    words = name.split(".")
    if len(words) > 1 and ((PACKAGE / words[1]).is_dir() or (PACKAGE / f"{words[1]}.py").is_file()):
        return words[1]
    return "native" if words[1:2] == ["_native"] else "__init__"


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in SOURCES} <= set(ALLOWED), "a new part needs its line in ALLOWED"


def wrong_imports(path: Path) -> Iterator[str]:
    part = part_of(path)
    where = path.relative_to(ROOT).as_posix()
    for name, line in imported_names(path, ROOT):
        top = name.split(".")[0]
        if top in {"tests", "benchmarks", "tools"}:
            yield f"{where}:{line}: {name} is not part of the package"
        elif top == "bert_fast":
            target = target_part(name)
            if target != part and target not in ALLOWED[part]:
                yield f"{where}:{line}: {part} must not import {name}"
            oracle = "bert_fast.reference.wordpiece"
            if part == "tokenization" and target == "reference" and not f"{name}.".startswith(f"{oracle}."):
                yield f"{where}:{line}: tokenization may import reference.wordpiece only, not {name}"
        elif top == "transformers" and part not in {"huggingface", "training", "cli", "bench"}:
            yield f"{where}:{line}: only huggingface, training (and its commands) and bench import transformers"
        elif top == "triton" and part not in {"triton", "testing"}:  # testing counts what the interpreter loads
            yield f"{where}:{line}: only the back-end triton imports triton"
        elif part in ALLOWED_PACKAGES and top not in sys.stdlib_module_names and top not in EVERYWHERE:
            exception = (path.relative_to(PACKAGE).as_posix(), top)
            if top not in ALLOWED_PACKAGES[part] and exception not in PACKAGE_EXCEPTIONS:
                yield f"{where}:{line}: {part} must not import {top}"


def test_imports_follow_the_order() -> None:
    wrong = [problem for path in SOURCES for problem in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


def test_the_parser_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "bert_fast" / "ops" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import bert_fast.a\nfrom bert_fast import b\nfrom . import c\nfrom ..d import e\nfrom .. import f\n"
        "def g():\n    import bert_fast.h as i\n    importlib.import_module('bert_fast.j')\n"
    )
    assert {name for name, _ in imported_names(path, tmp_path)} == {
        "bert_fast.a",
        "bert_fast.b",
        "bert_fast.ops.c",
        "bert_fast.d.e",
        "bert_fast.f",
        "bert_fast.h",
        "bert_fast.j",
    }


def loaded_by(statements: str) -> set[str]:
    """Modules in sys.modules of a fresh process after some statements."""
    code = f"import sys\n{statements}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


# What a user imports; the command line is not in it, since it may load what it likes when it is called.
PUBLIC_PARTS = {"ops", "modules", "optim", "models", "tokenization", "reference", "torch"}
PUBLIC = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in SOURCES
    if part_of(path) in PUBLIC_PARTS and path.name != "__init__.py"
)


@pytest.mark.parametrize("modules", [["bert_fast"], PUBLIC], ids=["bert_fast", "every public module"])
def test_import_adds_little_beyond_torch(modules: list[str]) -> None:
    before = loaded_by("import torch, numpy, safetensors.torch")
    after = loaded_by("import torch, numpy, safetensors.torch\n" + "\n".join(f"import {name}" for name in modules))
    added = {name.split(".")[0] for name in after - before}
    strangers = added - {"bert_fast"} - set(sys.stdlib_module_names)
    # pybind11 modules register helper modules of their own name.
    strangers = {name for name in strangers if not name.startswith(("_native", "pybind11"))}
    assert not strangers, f"importing bert_fast pulls in {sorted(strangers)}"
    heavy = {
        name for name in after - before if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed."))
    }
    assert not heavy, f"importing bert_fast pulls in {len(heavy)} modules of torch, among them {sorted(heavy)[:5]}"


def test_command_line_starts_without_torch_extras() -> None:
    after = loaded_by("import bert_fast.cli.main")
    assert not {"triton", "transformers", "tokenizers", "rich", "matplotlib"} & after


def test_a_torch_that_is_too_old_is_one_sentence() -> None:
    code = "import torch; torch.__version__ = '2.9.1+cpu'\nimport bert_fast"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    expected = "ImportError: bert_fast needs torch >= 2.10, this is 2.9.1+cpu: pip install 'torch>=2.10'"
    assert result.stderr.strip().splitlines()[-1] == expected


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0", "2.11.0.dev20260101+cu130", "main"])
def test_a_torch_that_is_new_enough_is_taken(version: str) -> None:
    check_torch(version)
