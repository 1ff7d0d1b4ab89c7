"""The stored table of a device: which tile, or the library, makes which matrix product fastest, as measured there.

`tuned/<slug>.json`, the slug being the device's name in lower case with "_" for everything but letters and digits
(`nvidia_h200.json`). Written by `python -m benchmarks.gemm_tuning` on that device; docs/kernels/linear.md has the
format. Read when the first product on the device is made. A table that is damaged, was made from other kernels or by
another minor version of Triton is ignored as a whole; `problem` says why, and so do `bert-fast doctor` and
`bert_fast.explain`.
"""

import ast
import functools
import hashlib
import json
import re
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "DTYPES",
    "FORMAT",
    "KINDS",
    "LAYOUTS",
    "Choice",
    "Table",
    "Tile",
    "problem",
    "program",
    "read",
    "slug",
    "source_hash",
    "stored",
]

FORMAT = 1
KINDS = ("plain", "accumulate", "activation", "derivative", "recomputed")
# Letters as in BLAS, a before b: n as its shape says, t transposed in memory. Forward is nt, dgrad nn, wgrad tn.
LAYOUTS = ("nn", "nt", "tn", "tt")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FOLDER = Path(__file__).with_name("tuned")
# The kernels and what they call. What the launcher passes to them for a table's tiles is the table's `launches`, which
# a test compares.
_SOURCES = ("_activations.py", "_gemm_epilogue.py", "_gemm_kernel.py")


@dataclass(frozen=True)
class Tile:
    """How a product is cut and launched.

    block_m, block_n, block_k: of the output, and of K in a step. num_warps; num_stages: of K blocks in shared memory.
    group_m: rows of tiles in a group (`_gemm_kernel.py`). warp_specialize: warps of their own for loads, on sm_90 where
    the copy engine moves everything; for column sums and split sums 8 warps make the tile. parts: 1, 2 or 4, the
    columns are finished one part after the other. split_k: parts of the sum over K, added by a second kernel. resident:
    programs meant to be on a multiprocessor at once, so that one multiplies while another finishes. max_registers: of a
    thread on NVIDIA's processors, where the compiler would rather spill a little than let another program in less; 0
    leaves it the choice.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    warp_specialize: bool = False
    parts: int = 1
    split_k: int = 1
    resident: int = 1
    max_registers: int = 0

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n, self.block_k, self.num_warps)
        if any(size < 1 or size & (size - 1) for size in sizes) or min(sizes[:3]) < 16:
            raise ValueError(f"blocks must be powers of two from 16 and num_warps a power of two; got {self}")
        if self.parts not in (1, 2, 4) or min(self.num_stages, self.group_m, self.split_k, self.resident) < 1:
            raise ValueError(f"parts must be 1, 2 or 4, stages, groups, splits and programs at least 1; got {self}")

    def __hash__(self) -> int:
        return self._hash  # plans of products are looked up by tiles at every launch

    @functools.cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def to_json(self) -> dict[str, int | bool]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> "Tile":
        """The tile that `to_json` wrote; ValueError for anything else."""
        types = {field.name: field.type for field in fields(cls)}
        if not isinstance(content, dict) or set(content) != set(types):
            raise ValueError(f"a tile must have the fields {', '.join(types)}; got {content}")
        for name, value in content.items():
            if type(value) is not types[name]:
                raise ValueError(f"{name} of a tile must be of type {types[name]}; got {value!r}")
        return cls(**content)


@dataclass(frozen=True)
class Choice:
    """Who makes a product: our kernel with this tile, or (None) the library."""

    tile: Tile | None


class Table:
    """A valid table.

    Products are told apart by kind, layout, dtype and the two sizes that belong to a weight, exactly; and by the number
    of tokens (M, or K in "tn"), of which the nearest power of two in the table is taken.
    """

    def __init__(self, content: object) -> None:
        """Raises ValueError, which says what is wrong, where the content is not as docs/kernels/linear.md has it."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"the format is not {FORMAT}")
        for name in ("device", "source", "triton"):
            if not isinstance(content.get(name), str):
                raise ValueError(f"{name} must be a string; got {content.get(name)!r}")
        if not isinstance(content.get("entries"), list):
            raise ValueError("entries must be a list")
        self.device: str = content["device"]
        self.source: str = content["source"]
        self.triton: str = content["triton"]
        self._choices: dict[tuple[object, ...], dict[int, Choice]] = {}
        for number, entry in enumerate(content["entries"]):
            try:
                key, tokens, choice = _parse(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"entry {number}: {type(error).__name__}: {error}") from None
            self._choices.setdefault(key, {})[_bucket(tokens)] = choice

    def find(self, kind: str, layout: str, dtype: torch.dtype, m: int, n: int, k: int) -> Choice | None:
        """The stored choice for a product; None where there is none for these weights."""
        key, tokens = _key(kind, layout, DTYPES[dtype], m, n, k)
        buckets = self._choices.get(key)
        if not buckets:
            return None
        wanted = _bucket(tokens)
        # Of two that are as near, the larger: its tiles fit where there is more work for them.
        return buckets[min(buckets, key=lambda bucket: (abs(bucket - wanted), -bucket))]


def _key(kind: str, layout: str, dtype: str, m: int, n: int, k: int) -> tuple[tuple[object, ...], int]:
    if layout == "tn":
        return (kind, layout, dtype, m, n), k
    return (kind, layout, dtype, n, k), m


def _bucket(tokens: int) -> int:
    """log2 of the number of tokens, rounded up."""
    return max(tokens - 1, 0).bit_length()


def _parse(entry: dict[str, Any]) -> tuple[tuple[object, ...], int, Choice]:
    for name, known in (("kind", KINDS), ("layout", LAYOUTS), ("dtype", tuple(DTYPES.values()))):
        if entry[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {entry[name]!r}")
    sizes = [entry[name] for name in ("m", "n", "k")]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"m, n and k must be positive integers; got {sizes}")
    key, tokens = _key(entry["kind"], entry["layout"], entry["dtype"], *sizes)
    return key, tokens, Choice(None if entry["tile"] is None else Tile.from_json(entry["tile"]))


def program(text: str) -> str:
    """A Python file as its syntax tree: without comments, docstrings and layout; the same in all versions of Python."""

    def shown(node: object) -> str:
        if isinstance(node, list):
            return f"[{','.join(map(shown, node))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        # A field without a value is left out: newer versions of Python have more of them.
        values = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({','.join(f'{name}={shown(value)}' for name, value in values)})"

    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A string that stands alone is a docstring, or nothing.
            is_text = [isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in body]
            body[:] = [one for one, is_left_out in zip(body, is_text, strict=True) if not is_left_out]
    return shown(tree)


@functools.cache
def source_hash() -> str:
    """Hash of the kernels' programs; a table made from another one is stale."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        digest.update(f"{name}\0{program(text)}\0".encode())
    return digest.hexdigest()[:16]


def slug(device_name: str) -> str:
    """The device's name as the file of its table has it."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def read(path: Path, triton_version: str) -> tuple[Table | None, str | None]:
    """(the table, None), or (None, why it is not used)."""
    if not path.is_file():
        return None, f"no table is stored for this device ({path.name})"
    try:
        table = Table(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # json's errors are ValueErrors
        return None, f"{path.name} is damaged: {error}"
    if table.source != source_hash():
        return None, f"{path.name} was made from other kernels (source {table.source}, now {source_hash()})"
    if table.triton.split(".")[:2] != triton_version.split(".")[:2]:
        return None, f"{path.name} was made with Triton {table.triton}, this is {triton_version}"
    return table, None


@functools.cache
def stored(device_name: str) -> tuple[Table | None, str | None]:
    """`read` of the device's table, once."""
    import triton

    return read(FOLDER / f"{slug(device_name)}.json", triton.__version__)


def problem(device_name: str) -> str | None:
    """Why the table that is stored for a device is not used; None where it is used, or none is stored."""
    return stored(device_name)[1] if (FOLDER / f"{slug(device_name)}.json").is_file() else None
