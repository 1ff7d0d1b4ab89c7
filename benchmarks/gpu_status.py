"""What is owed to a GPU: one line per Triton kernel whose present source has no stored GPU result.

    python -m benchmarks.gpu_status

Needs neither torch nor triton. A result counts for a kernel family when its line in benchmarks/results/*.jsonl has
`"source_hash"` equal to `source_hash(<family>)` and names the GPU that ran it (`"gpu"`). The hash covers the family's
file and the files of bert_fast/kernels that it imports, so a changed helper makes every result that used it old.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "bert_fast" / "kernels"
RESULTS = ROOT / "benchmarks" / "results"


def families() -> list[str]:
    """Names of the kernel families; files that start with an underscore hold helpers."""
    return sorted(path.stem for path in KERNELS.glob("*.py") if not path.name.startswith("_"))


def source_hash(family: str) -> str:
    """Hash of everything in bert_fast/kernels that decides what the kernels of a family compile to."""
    digest = hashlib.sha256()
    for path in _with_imports(KERNELS / f"{family}.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kernel_names(family: str) -> list[str]:
    """Functions of a family's file that are decorated with `triton.jit` and launched (named `_..._kernel`)."""
    functions = [node for node in _parse(KERNELS / f"{family}.py").body if isinstance(node, ast.FunctionDef)]
    jitted = [node.name for node in functions if any("jit" in ast.unparse(item) for item in node.decorator_list)]
    return [name for name in jitted if name.endswith("_kernel")]


def measured_hashes() -> dict[str, set[str]]:
    """source hash -> names of the GPUs with a stored result for it."""
    measured: dict[str, set[str]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                result = json.loads(line)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path.relative_to(ROOT)}, line {number}: no JSON ({error})") from None
            if result.get("source_hash") and result.get("gpu"):
                measured.setdefault(result["source_hash"], set()).add(result["gpu"])
    return measured


def owed() -> list[tuple[str, str, str]]:
    """(family, kernel, source hash) of every kernel without a GPU result for its present source."""
    measured = measured_hashes()
    found = []
    for family in families():
        current = source_hash(family)
        if current not in measured:
            found += [(family, kernel, current) for kernel in kernel_names(family)]
    return found


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _with_imports(path: Path) -> list[Path]:
    """A file of bert_fast/kernels and those of the same folder that it imports, directly or not, sorted."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += _imports(current)
    return sorted(seen)


def _imports(path: Path) -> Iterator[Path]:
    prefix = "bert_fast.kernels"
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1:
                module = f"{prefix}.{module}" if module else prefix
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(prefix + "."):
                candidate = KERNELS / f"{name.split('.')[2]}.py"
                if candidate.is_file():
                    yield candidate


def main() -> int:
    total = sum(len(kernel_names(family)) for family in families())
    missing = owed()
    for family, kernel, current in missing:
        print(f"{family}: {kernel}: no GPU result for source {current}")
    print(f"{total - len(missing)} of {total} Triton kernels have a GPU result for their present source")
    return 0


if __name__ == "__main__":
    sys.exit(main())
