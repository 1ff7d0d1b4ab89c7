"""How settled results say once what several lines share: `folded` writes it, `unfolded` reads it.

    {"kind": "shared", "gpu": "NVIDIA H200", "digests": {"_gemm_kernel": "d479f19cad0ff1e4"}, "of": {"gemm": {...}}}
    {"kind": "verify", "ok": true, "case": {"kernel/linear/...": {"launched": ["_gemm_kernel"]}, "kernel/mlp/...": {}}}
    {"kind": "timing", "case": "kernel/linear/...", "mode": {"fwd": {"bytes": 515, "provider": {"bert_fast": ...}}}}
    {"kind": "tests", "file": "tests/kernels/test_linear_gpu.py", "passed": {"test_values": ["bfloat16", "float16"]}}

What a line of kind "shared" says holds for all lines below it, until the next one; `of`, for those of one kind. A line
whose case, mode, provider or candidate is an object stands for a line for each of its names. Digests of kernels and
fields of tiles are said above, too: a line has `launched` instead of `kernels`, and no `tile`. What a case launched
is said where it was verified, and not again where it was timed.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

Line = dict[str, Any]
# What a line is a result of; which of the fields it has depends on its kind.
CASE = (
    "kind", "family", "case", "test", "tool", "what", "product", "layout", "dtype", "m", "n", "k", "length",
    "dropout_p", "mode", "model", "side", "seed",
)  # fmt: skip
CONTESTANT = ("provider", "candidate")
# Never said above the lines, even where all of them have the same: the fields that may be objects, and of tests.
_OF_ONE = ("kind", "case", "test", "mode", "outcome", *CONTESTANT)
# By kind, the fields of which one line names several, from within outwards.
_SEVERAL = {
    "timing": ("provider", "mode"), "step": ("provider",), "finetune": ("provider",), "embedding": ("provider",),
    "gemm": ("candidate",), "tiles": ("candidate",), "trial": ("candidate",), "verify": ("case",), "smoke": ("case",),
}  # fmt: skip


def folded(lines: Iterable[Line]) -> Iterator[Line]:
    """The same results in fewer and shorter lines. All lines of a run get the time of its last one."""
    for _, group in groupby(lines, _origin):
        yield from _of_one_origin(list(group))


def unfolded(lines: Iterable[Line]) -> Iterator[Line]:
    """The results that the lines of a file stand for. Lines that were not settled yet stand for themselves."""
    shared: Line = {}
    checked: dict[str, Line] = {}  # case -> what it launched
    for line in lines:
        if "tests" in line or (line.get("kind") == "run" and "case" not in line):
            raise SystemExit("results that an older version settled: take them from before that, as they were written")
        if line.get("kind") == "shared":
            shared, checked = line, {}
        elif not shared or line.keys() & {"run", "processor"}:
            yield line
        else:
            ones = _tests(line) if line["kind"] == "tests" else iter([line])
            for field in reversed(_SEVERAL.get(line["kind"], ())):
                ones = _each(ones, field)
            for one in ones:
                whole = _completed(one, checked, **shared)
                if whole["kind"] == "verify":
                    checked[whole["case"]] = whole["kernels"]
                yield whole


def _origin(line: Line) -> tuple[Any, ...]:
    """The run of a line of a GPU; of a line of a CPU, which names none, the commit and the machine."""
    return (line["run"],) if "run" in line else tuple(line.get(name) for name in ("commit", "processor", "threads"))


def _of_one_origin(lines: list[Line]) -> Iterator[Line]:
    shared = _common(lines, but=_OF_ONE)
    if "run" in shared:
        shared["time"] = max(line["time"] for line in lines)
    launched = [line["kernels"] for line in lines if isinstance(line.get("kernels"), dict)]
    digests = dict(sorted(pair for kernels in launched for pair in kernels.items()))
    tiles = {line["candidate"]: line["tile"] for line in lines if "tile" in line}
    checked = {line["case"]: line["kernels"] for line in lines if line["kind"] == "verify"}
    by_kind: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["kind"] != "verify"):
        short = _without(_shortened(line, checked, digests, tiles), shared)
        by_kind.setdefault(line["kind"], []).append({"kind": line["kind"]} | short)
    of = {kind: _common(short, but=_OF_ONE) for kind, short in by_kind.items()}
    tables = {"digests": digests, "tiles": tiles, "of": {kind: same for kind, same in of.items() if same}}
    yield {"kind": "shared"} | shared | {name: table for name, table in tables.items() if table}
    for kind, of_kind in by_kind.items():
        short_lines: Iterable[Line] = [_without(line, of[kind]) for line in of_kind]
        for field in _SEVERAL.get(kind, ()):
            short_lines = _several(short_lines, field)
        yield from _by_file(short_lines)


def _common(lines: Sequence[Line], but: Collection[str] = ()) -> Line:
    """The fields that all of these lines have with the same value."""
    first, *others = lines
    return {
        name: value
        for name, value in first.items()
        if name not in but and all(name in other and other[name] == value for other in others)
    }


def _without(line: Line, names: Collection[str]) -> Line:
    return {name: value for name, value in line.items() if name not in names}


def _shortened(line: Line, checked: Line, digests: Line, tiles: Line) -> Line:
    """A line that leaves kernels and tiles to what is said above it."""
    kernels = line.get("kernels")
    if line["kind"] == "timing" and kernels is not None and kernels == checked.get(line["case"]):
        line = _without(line, ["kernels"])
    elif isinstance(kernels, dict) and kernels.items() <= digests.items():
        line = _without(line, ["kernels"]) | {"launched": list(kernels)}
    return _without(line, ["tile"]) if "tile" in line and tiles[line["candidate"]] == line["tile"] else line


def _completed(
    line: Line, checked: Line, *, digests: Line | None = None, tiles: Line | None = None,
    of: dict[str, Line] | None = None, **shared: Any,
) -> Line:  # fmt: skip
    """`_shortened` undone, with what the line shares with others."""
    whole = shared | (of or {}).get(line["kind"], {}) | line
    if "launched" in whole:
        whole["kernels"] = {kernel: (digests or {})[kernel] for kernel in whole.pop("launched")}
    elif whole["kind"] == "timing" and "verified" in whole and "kernels" not in whole:
        whole["kernels"] = checked[whole["case"]]
    if whole["kind"] == "gemm" and tiles and "tile" not in whole:
        whole["tile"] = tiles[whole["candidate"]]
    return whole


def _several(lines: Iterable[Line], field: str) -> list[Line]:
    """One line for all that differ in one field alone, and in what was measured."""
    groups: list[dict[str, Line]] = []
    newest: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        key = tuple(line.get(name) for name in CASE if name != field)
        if key not in newest or line[field] in newest[key]:
            newest[key] = {}
            groups.append(newest[key])
        newest[key][line[field]] = line
    made = []
    for group in groups:
        same = _common(list(group.values()))
        own = {name: _without(line, {*same, field}) for name, line in group.items()}
        made.append(same if len(group) == 1 else same | {field: own})
    return made


def _each(lines: Iterable[Line], field: str) -> Iterator[Line]:
    """`_several` undone."""
    for line in lines:
        if isinstance(line.get(field), dict):
            same = _without(line, [field])
            yield from (same | {field: name} | own for name, own in line[field].items())
        else:
            yield line


def _by_file(lines: Iterable[Line]) -> Iterator[Line]:
    """Of tests that passed a line for each file, with the parameters of each; the other lines as they are."""
    files: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        if line["kind"] != "test" or line["outcome"] != "passed":
            yield line
            continue
        file, test = line["test"].split("::", 1)
        test, has_parameters, parameters = test.partition("[")
        found = files.setdefault(file, {}).setdefault(test, [])
        if has_parameters:
            found.append(parameters.removesuffix("]"))
    yield from ({"kind": "tests", "file": file, "passed": passed} for file, passed in files.items())


def _tests(line: Line) -> Iterator[Line]:
    """`_by_file` undone."""
    for test, parameters in line["passed"].items():
        names = [f"{test}[{each}]" for each in parameters] or [test]
        yield from ({"kind": "test", "outcome": "passed", "test": f"{line['file']}::{name}"} for name in names)
