"""Tiles of the matrix products, and who makes a product: our kernel, or the library and a separate kernel.

`choose` asks, in this order:
1. whether our kernel is any good: for rows that start at whole 16 bytes, and to accumulate for fp32 results; else the
   library;
2. the stored table of this device, or of one like it (below), if it was made from the present kernels;
3. the heuristic, whose reasons are in docs/decisions/0008-gemm-choice.md:

    plain products, bias, accumulation                        library: nothing to fuse that it does not fuse itself
    the same with a vocabulary no multiple of 8, on sm_90     ours: the library has but older kernels for it
    the same on AMD, fp32 results of half precision           ours: there the library rounds to half precision first
    fp32 operands, whatever follows                           library: three TF32 products for one are no match for it
    half precision, fewer than _MIN_ROWS rows                 library: our smallest tile would be mostly padding
    half precision, activations and derivatives               ours: saves a pass over the output, or more

`choose_for_weights` is asked within `batch_invariant`, where the order of a sum may depend on nothing but the sizes of
the weight and how matrices lie: always our kernel, never in parts of K, and without a table, whose choices are made for
numbers of tokens.

Kinds of processor, as for attention: sm_90 and sm_100 (operands from shared memory, copy engine), sm_80 and sm_86
(operands in registers; the same tiles for data centres' chips and for cards, so at most 99 KB of shared memory), gfx
(AMD CDNA: 64 KB). Chosen so that nothing spills (docs/kernels/ahead_of_time.md), under the oldest Triton neither.

Stored tables: `tuned/<slug>.json` says which tile, or the library, makes which product fastest, as measured on a
device. The slug is the device's name in lower case with "_" for everything but letters and digits
(`nvidia_h200.json`). Written by `python -m benchmarks.gemm_tuning` on that device; docs/kernels/linear.md has the
format. Read when the first product on the device is made. A device without a table takes that of another one with the
same instruction set and nearly as many multiprocessors (an H100 the H200's).

A table that is damaged, was made from other kernels, or whose tiles this minor version of Triton was not seen to
compile as well is ignored as a whole. `bert_fast.explain` says which table is taken, or why not; so does
`bert-fast doctor`.
"""

import ast
import functools
import hashlib
import json
import re
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.devices import chip
from bert_fast.triton._launch import architecture, ceil_div, kind_of, num_multiprocessors

FORMAT = 1
KINDS = ("plain", "accumulate", "activation", "derivative", "recomputed")
# Letters as in BLAS, a before b: n as its shape says, t transposed in memory. Forward is nt, dgrad nn, wgrad tn.
LAYOUTS = ("nn", "nt", "tn", "tt")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FOLDER = Path(__file__).with_name("tuned")
_FIELDS = {
    "device": str, "architecture": str, "multiprocessors": int, "source": str, "tritons": list, "entries": list,
}  # fmt: skip
_NEAR = 0.8  # a device has another's table from so many of its multiprocessors on, and to the inverse
# The kernels and what they call. What the launcher passes to them for a table's tiles is the table's `launches`, which
# a test compares.
_SOURCES = ("_activations.py", "_gemm_kernel.py")


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
        for name, kind in _FIELDS.items():
            if type(content.get(name)) is not kind:
                raise ValueError(f"{name} must be of type {kind.__name__}; got {content.get(name)!r}")
        self.device: str = content["device"]
        self.architecture: str = content["architecture"]
        self.multiprocessors: int = content["multiprocessors"]
        self.source: str = content["source"]
        self.tritons: list[str] = content["tritons"]
        measured: dict[tuple[object, ...], dict[int, Choice]] = {}
        for number, entry in enumerate(content["entries"]):
            try:
                key, tokens, choice = _parse(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"entry {number}: {type(error).__name__}: {error}") from None
            measured.setdefault(key, {})[_bucket(tokens)] = choice
        self._choices = {key: _by_bucket(choices) for key, choices in measured.items()}

    def find(self, kind: str, layout: str, dtype: torch.dtype, m: int, n: int, k: int) -> Choice | None:
        """The stored choice for a product; None where there is none for these weights."""
        key, tokens = _key(kind, layout, DTYPES[dtype], m, n, k)
        choices = self._choices.get(key)
        return None if choices is None else choices[_bucket(tokens)]


def _by_bucket(measured: dict[int, Choice]) -> list[Choice]:
    """The choice for every bucket that an integer of PyTorch's can have: that of the nearest measured one.

    Of two that are as near, the larger: its tiles fit where there is more work for them.
    """
    return [measured[min(measured, key=lambda one: (abs(one - bucket), -one))] for bucket in range(64)]


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
    """Hash of the kernels' programs, in whichever order and file; a table made from another one is stale."""
    programs = []
    for name in _SOURCES:
        body = ast.parse(Path(__file__).with_name(name).read_text(encoding="utf-8")).body
        defined = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
        programs += [program(ast.unparse(node)) for node in defined]
    return hashlib.sha256("\0".join(sorted(programs)).encode()).hexdigest()[:16]


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
    problem = _problem(table, path.name, triton_version)
    return (table, None) if problem is None else (None, problem)


def _problem(table: Table, name: str, triton_version: str) -> str | None:
    """Why a valid table is not used; None where it is."""
    if table.source != source_hash():
        return f"{name} was made from other kernels (source {table.source}, now {source_hash()})"
    if ".".join(triton_version.split(".")[:2]) not in table.tritons:
        return f"{name} is for Triton {', '.join(table.tritons)}, this is {triton_version}"
    return None


class Stored(NamedTuple):
    """table: None where there is none for a device, or where `problem` says why it is not used."""

    table: Table | None
    problem: str | None


@functools.cache
def stored(device: str, architecture: str, multiprocessors: int) -> Stored:
    """The device's table, or that of the nearest device; looked for once.

    Nearest: of those with this instruction set and nearly as many multiprocessors.
    """
    import triton

    own = FOLDER / f"{slug(device)}.json"
    if own.is_file():
        return Stored(*read(own, triton.__version__))
    found: list[tuple[bool, int, str, Stored]] = []  # those that can be used first
    for path in sorted(FOLDER.glob("*.json")):
        try:
            table = Table(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # damaged: users of the device that it is of read so
            continue
        count = table.multiprocessors
        if table.architecture == architecture and min(count, multiprocessors) >= _NEAR * max(count, multiprocessors):
            problem = _problem(table, path.name, triton.__version__)
            one = Stored(table if problem is None else None, problem)
            found.append((problem is not None, abs(count - multiprocessors), path.name, one))
    return min(found)[-1] if found else Stored(None, None)


ALIGNMENT = 16  # bytes, of tensor descriptors' bases and strides; as much as one load can be wide

# Large enough that few programs run, small enough that several tiles and steps are there.
INTERPRETER_TILE = Tile(64, 64, 64, num_stages=2)

# Candidates in half precision by role, in this order:
# wide    the most products for a byte of shared memory, one program to a multiprocessor: where K is long
# twin    two programs to a multiprocessor: one multiplies while the other finishes its tile
# third   sm_90: warps of their own for loads; elsewhere another shape of twin
# small   for outputs of few tiles
_OF_REGISTERS = (
    Tile(128, 128, 32, 8, 4, parts=2),
    # As many operands for a product as wide has, a warp's part being the same: 128 x 128 for 4 warps would spill.
    Tile(64, 128, 32, num_stages=4, parts=4, resident=2, max_registers=255),
    Tile(128, 64, 32, num_stages=4, parts=4, resident=2, max_registers=255),
    Tile(64, 64, 32, 4, 4, resident=2, max_registers=255),
)
_HALF = {
    "sm_90": (
        Tile(128, 256, 64, 8, 3, parts=4),
        Tile(128, 128, 64, 4, 3, parts=4, resident=2),
        Tile(128, 128, 64, 4, 4, warp_specialize=True),
        Tile(64, 128, 64, 4, 4, parts=2, resident=2),
    ),
    "sm_100": (
        Tile(128, 256, 64, 8, 3, parts=4),
        Tile(128, 128, 64, 4, 3, parts=4, resident=2),
        Tile(128, 128, 64, 8, 4, parts=4),
        Tile(64, 128, 64, 4, 3, parts=2, resident=2, max_registers=255),
    ),
    "sm_80": _OF_REGISTERS,
    "sm_86": _OF_REGISTERS,
    "gfx": (
        Tile(128, 128, 32, 8, 2),
        Tile(128, 128, 64, 4, 2),
        Tile(128, 64, 64, 4, 2),
        Tile(64, 64, 64, 4, 2),
    ),
}
# There to be exact, not fast: three terms of TF32 take a dozen instructions to make of each operand.
_FP32 = {
    "sm_90": (Tile(64, 64, 32, 4, 2),),
    "sm_100": (Tile(64, 64, 32, 4, 2),),
    "sm_80": (Tile(64, 64, 16, 4, 2, max_registers=255),),
    "sm_86": (Tile(64, 64, 16, 4, 2, max_registers=255),),
    "gfx": (Tile(64, 64, 32, 4, 2),),
}

_MIN_ROWS = 64
# Below this K the epilogue takes so large a part of a tile's time that hiding it outweighs the wider tile: a wide tile
# multiplies for 16 K clocks and finishes for 5,600 (GELU) to 9,200 (its derivative, GELU again, column sums); twins
# hide that, at four fifths of the rate, as they ask shared memory for 160 bytes a clock where it has 128.
_LONG_K = 2048
_MAX_SPLITS = 8
# Of plain products with a vocabulary (`of_vocabulary`): from how many words on it is one; elements of half precision
# that the library wants to lie side by side; and how long a sum of ours may be, since one over all of 30,522 words was
# further from fp64 than the library's, and a half of it was not.
_VOCABULARY = 8192
_LIBRARYS_UNIT = 8
_LONGEST_SUM = 16384
_MIN_STEPS_OF_A_SPLIT = 8


def row_major(t: Tensor) -> tuple[Tensor, bool]:
    """(the matrix or its transpose with neighbours in rows, whether it is the transpose); a copy where neither has."""
    row_stride, col_stride = t.stride()
    if col_stride == 1:
        return t, False
    if row_stride == 1:
        return t.t(), True
    return t.contiguous(), False


def has_aligned_rows(t: Tensor) -> bool:
    """Whether a tensor descriptor can name this row-major matrix: rows of their own that start at whole 16 bytes."""
    rows, cols = t.shape
    row_stride, col_stride = t.stride()
    starts = t.data_ptr() | row_stride * t.element_size()
    return rows > 0 and 0 < cols <= row_stride and col_stride == 1 and starts % ALIGNMENT == 0


def candidates(name: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles for a processor ("sm_90", "gfx942", ...) and dtype; in half precision wide, twin, third and small."""
    if dtype == torch.float32:
        return _FP32[kind_of(name)]
    return _HALF[kind_of(name)]


def choose(kind: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tile | None:
    """The tile with which our kernel makes a [M, K] @ b [K, N] and what follows; None: the library. M, N, K >= 1.

    kind: as in `_gemm_kernel.py`. out_dtype: of the result, a's or fp32.
    """
    if kind == "accumulate" and out_dtype != torch.float32:
        return None
    table = None
    if a.is_cuda:
        table = _table_of(torch.cuda.current_device() if a.device.index is None else a.device.index)
    name = architecture(a.device)
    is_librarys = kind in _PLAIN and (out_dtype == a.dtype or name.startswith("sm_"))
    # Nothing is asked of sizes: an answer about the number of tokens would be a guard of every layer's program.
    if table is None and is_librarys and not _has_odd_vocabularies(a.dtype, name):
        return None
    (m, k), n = a.shape, b.shape[1]
    (a_rows, a_transposed), (b_rows, b_transposed) = row_major(a), row_major(b)
    if not (has_aligned_rows(a_rows) and has_aligned_rows(b_rows)):
        return None
    layout = "nt"[a_transposed] + "nt"[b_transposed]  # BLAS letters: t for an operand that lies transposed
    found = None if table is None else table.find(kind, layout, a.dtype, m, n, k)
    if found is not None:
        return found.tile
    if is_librarys:
        return of_vocabulary(kind, layout, (m, n, k), a.dtype, name, num_multiprocessors(a.device))
    return heuristic(kind, m, n, k, a.dtype, name, num_multiprocessors(a.device))


def choose_for_weights(kind: str, a: Tensor, b: Tensor) -> Tile:
    """The tile of our kernel for a [M, K] @ b [K, N] and what follows, whatever M is."""
    return _tile_for_weights(kind, b.shape[0], a.dtype, architecture(a.device))


@functools.lru_cache(maxsize=1024)
def _tile_for_weights(kind: str, k: int, dtype: torch.dtype, name: str) -> Tile:
    if dtype == torch.float32:
        return candidates(name, dtype)[0]
    wide, twin, *_ = candidates(name, dtype)
    return _of_many_rows(wide, twin, kind, k)


def _of_many_rows(wide: Tile, twin: Tile, kind: str, k: int) -> Tile:
    return wide if k >= _LONG_K or kind in _PLAIN else twin


_PLAIN = ("plain", "accumulate")  # kinds with nothing to fuse that the library does not fuse


@functools.cache
def _table_of(index: int) -> Table | None:
    """The stored table for a CUDA device, if one can be used; asked once."""
    device = chip(index)
    return stored(device.product, device.name, device.multiprocessors).table


def heuristic(kind: str, m: int, n: int, k: int, dtype: torch.dtype, name: str, multiprocessors: int) -> Tile | None:
    """What to do where nothing was measured and there is something to fuse; name: of the processor."""
    if dtype == torch.float32 or m < _MIN_ROWS:
        return None
    wide, twin, _, small = candidates(name, dtype)
    tile = twin if k < _LONG_K and kind not in _PLAIN else wide
    if _num_tiles(tile, m, n) >= multiprocessors * tile.resident:
        return tile
    # Too few tiles to go round: smaller ones, and parts of K side by side where it is long.
    idle = multiprocessors * small.resident // _num_tiles(small, m, n)
    steps = ceil_div(k, small.block_k)
    splits = min(idle, _MAX_SPLITS, steps // _MIN_STEPS_OF_A_SPLIT)
    return replace(small, split_k=max(1, splits))


def of_vocabulary(
    kind: str, layout: str, sizes: tuple[int, int, int], dtype: torch.dtype, name: str, multiprocessors: int
) -> Tile | None:
    """Our tile for a plain product with a vocabulary whose size is no multiple of 8, on sm_90; None for any other.

    These are logits (nt), the gradient of their rows (nn) and that of their weight (tn). The library's kernels for
    sm_90 want rows of whole 16 bytes along that size, and older ones take two to three times as long as ours.
    """
    if not _has_odd_vocabularies(dtype, name):
        return None
    m, n, k = sizes
    words, rows = {"nt": (n, m), "nn": (k, m), "tn": (m, k)}.get(layout, (0, 0))
    if words < _VOCABULARY or words % _LIBRARYS_UNIT == 0 or rows < _MIN_ROWS:
        return None
    wide, twin, *_ = candidates(name, dtype)
    if layout != "nn":
        return wide if kind == "accumulate" else twin
    parts = ceil_div(words, _LONGEST_SUM)
    splits = max(parts, min(multiprocessors // _num_tiles(wide, m, n), _MAX_SPLITS))
    return replace(wide, split_k=splits) if parts <= _MAX_SPLITS else None


@functools.cache
def _has_odd_vocabularies(dtype: torch.dtype, name: str) -> bool:
    return dtype != torch.float32 and kind_of(name) == "sm_90"


def _num_tiles(tile: Tile, m: int, n: int) -> int:
    return ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)
