"""Loads bert_fast so that it treats tensors on the CPU as a GPU's, and answers its questions of torch.cuda.

Where the package compares a tensor's device type (`x.device.type == "cpu"`), asks `x.is_cuda`, `x.is_cpu` or for the
device's index, the answer becomes that of a GPU: so the back-end is chosen, values go unchecked and offsets are sorted.
It is done to the syntax tree as modules are imported; line numbers and all else stay. What was compiled is kept in
`build/null_driver/answers`, apart from Python's own cache. A device itself remains the CPU's: memory is allocated and
torch's operators run there.
"""

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from tools.null_driver.build import CACHE_DIR

# What talks to torch.cuda itself: runs, commands, graphs.
_AS_THEY_ARE = ("bert_fast.training", "bert_fast.cli", "bert_fast.data", "bert_fast.graphs")


class _Answers(ast.NodeTransformer):
    """`device.type` in comparisons is "cuda", `is_cuda` True, `is_cpu` False, `device.index` as of `get_device()`."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if _is_of_device(node.left, "type") and not _names(node.comparators[0], "meta"):
            node.left = ast.copy_location(ast.Constant("cuda"), node.left)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in ("is_cuda", "is_cpu"):
            return ast.copy_location(ast.Constant(node.attr == "is_cuda"), node)
        return ast.copy_location(ast.Constant(-1), node) if _is_of_device(node, "index") else node


def _is_of_device(node: ast.expr, attribute: str) -> bool:
    """Whether an expression is `device.<attribute>` or `<something>.device.<attribute>`."""
    if not (isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load)):
        return False
    of = node.value
    return (of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")) == "device"


def _names(node: ast.expr, device_type: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == device_type


def answer_for_gpu(source: bytes | str) -> ast.Module:
    """The syntax tree of a module with a GPU's answers."""
    return _Answers().visit(ast.parse(source))


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        """Compiles a module, or reads what was compiled of this source: most of the time of an import."""
        parts = (data, path.encode(), importlib.util.MAGIC_NUMBER, str(_optimize).encode(), Path(__file__).read_bytes())
        kept = CACHE_DIR / "answers" / hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
        if kept.exists():
            return marshal.loads(kept.read_bytes())  # type: ignore[no-any-return]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # `-1 is None`
            code = compile(answer_for_gpu(data), path, "exec", dont_inherit=True, optimize=_optimize)
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")  # another process may compile the same
        unfinished.write_bytes(marshal.dumps(code))
        unfinished.replace(kept)
        return code

    def path_stats(self, path: Any) -> Any:
        raise OSError("neither read nor written: compiled code in Python's cache has other answers")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith("bert_fast.") or fullname.startswith(_AS_THEY_ARE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None  # the extension is found by those who come after: under the sanitizers it is another one
        spec.loader = _Loader(fullname, spec.loader.path)
        return spec


_libraries: list[Any] = []  # implementations are gone with the object that holds them


def install(capability: int, multiprocessors: int, shared_bytes: int, *, has_products: bool = False) -> None:
    """Once a process, before bert_fast is imported.

    has_products: whether the library's products that round to another dtype are computed, where somebody looks.
    """
    if "bert_fast" in sys.modules:
        raise RuntimeError("bert_fast is imported already: it has the CPU's answers")
    sys.meta_path.insert(0, _Finder())
    import torch

    major, minor = divmod(capability, 10)
    name = f"null sm_{capability}"
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared_bytes,
    )  # fmt: skip
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_name = lambda device=None: name
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor.clone()
    # Products that round to another dtype in one launch, which the CPU has not.
    aten = torch.library.Library("aten", "IMPL")

    def mm(a: Any, b: Any, out_dtype: Any, *, out: Any) -> Any:
        return torch.mm(a.to(out_dtype), b.to(out_dtype), out=out) if has_products else out

    def addmm(x: Any, a: Any, b: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
        if not has_products:
            return out
        return out.copy_(torch.addmm(x, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha))

    aten.impl("mm.dtype_out", mm, "CPU")
    aten.impl("addmm.dtype_out", addmm, "CPU")
    _libraries.append(aten)
