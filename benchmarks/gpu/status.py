"""What is owed to a GPU: one line per Triton kernel whose present source has no GPU result; nothing when none is owed.

    python -m benchmarks.gpu.status [--results FOLDER]

Needs neither torch nor triton. A result is a line of FOLDER/*.jsonl (benchmarks/results) that a case left which was
verified and timed on a GPU, or a tile of a matrix product (kind "gemm"), since a case may leave its products to the
library. It counts for the kernels that were launched, if they still have the source that it names. A kernel's source is
its file and the files of bert_fast/kernels that the file imports, so a changed helper makes every result that used it
old.
"""

import argparse
import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.kit.record import RESULTS, ROOT, read_lines

KERNELS = ROOT / "bert_fast" / "kernels"


def files() -> list[str]:
    """Names of the files that hold kernels: families, and helpers that launch kernels of their own."""
    return sorted(path.stem for path in KERNELS.glob("*.py") if kernel_names(path.stem))


def source_hash(file: str) -> str:
    """Hash of everything in bert_fast/kernels that decides what the kernels of a file compile to."""
    digest = hashlib.sha256()
    for path in _with_imports(KERNELS / f"{file}.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kernel_names(file: str) -> list[str]:
    """Functions of a file that are decorated with `triton.jit` and launched (named `_..._kernel`)."""
    return [*_read(KERNELS / f"{file}.py").kernels]


def kernel_hashes() -> dict[str, str]:
    """Kernel -> hash of its present source."""
    return {kernel: source_hash(file) for file in files() for kernel in kernel_names(file)}


def measured(*folders: Path) -> set[tuple[str, str]]:
    """(kernel, source hash) of everything that was verified and timed on a GPU, by the results in the folders."""
    lines = (line for folder in folders for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path))
    return {
        (kernel, source)
        for line in lines
        if (line.get("kind"), line.get("provider")) in {("timing", "bert_fast"), ("gemm", None)}
        if line.get("gpu") and line.get("verified") is True
        for kernel, source in line.get("kernels", {}).items()
    }


def owed(*folders: Path) -> list[tuple[str, str, str]]:
    """(file, kernel, source hash) of every kernel without a GPU result for its present source.

    folders: where results are; benchmarks/results where none is named.
    """
    done = measured(*(folders or (RESULTS,)))
    found = []
    for file in files():
        current = source_hash(file)
        found += [(file, kernel, current) for kernel in kernel_names(file) if (kernel, current) not in done]
    return found


class _Source(NamedTuple):
    """What is to be known of a file's text."""

    kernels: tuple[str, ...]
    imported: tuple[str, ...]  # names of bert_fast.kernels, those of modules and of what is in them


def _read(path: Path) -> _Source:
    return _parsed(path.read_text(encoding="utf-8"))


@functools.cache  # of the text: hashes are asked for before every case that runs
def _parsed(text: str) -> _Source:
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [node.name for node in functions if any("jit" in ast.unparse(item) for item in node.decorator_list)]
    return _Source(tuple(name for name in jitted if name.endswith("_kernel")), tuple(_imported(tree)))


def _imported(tree: ast.Module) -> Iterator[str]:
    prefix = "bert_fast.kernels"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1:
                module = f"{prefix}.{module}" if module else prefix
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[2] for name in names if name.startswith(prefix + "."))


def _with_imports(path: Path) -> list[Path]:
    """A file of bert_fast/kernels and those of the same folder that it imports, directly or not, sorted."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            named = (KERNELS / f"{name}.py" for name in _read(current).imported)
            waiting += [one for one in named if one.is_file()]
    return sorted(seen)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.status", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results; default: %(default)s")
    for file, kernel, current in owed(parser.parse_args(arguments).results):
        print(f"{file}: {kernel} ({current})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
