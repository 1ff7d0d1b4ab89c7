"""The stored table of a GPU's matrix products, made from lines of kind "gemm"; `benchmarks/gemm_tuning` writes them.

Of each product and tile the newest result counts, as its ratio to the library in the same rounds, so that results of
several runs can stand together. The fastest tile is taken, unless one that was listed before it is as fast but for
noise; the library where that tile is slower. Results of other kernels than the present ones, or of another minor
version of Triton than the newest in the results, do not count. Needs no GPU.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.kit.results import ROOT, read_lines

FOLDER = ROOT / "bert_fast" / "triton" / "tuned"
NOISE = 0.02  # a candidate that is better by less than that does not replace the one before it
_RATIO = "speedup_over_library"
_KEY = ("product", "layout", "dtype", "m", "n", "k")
Line = dict[str, Any]


def newest(lines: Iterable[Line]) -> list[Line]:
    """Of one product's lines, each contestant's newest, in the order in which they first came; of the last's source."""
    lines = list(lines)
    found: dict[str, Line] = {}
    for line in lines:
        if line["source"] == lines[-1]["source"]:
            found[line["candidate"]] = line
    return list(found.values())


def best(lines: Iterable[Line]) -> tuple[Line | None, Line | None]:
    """(the library's line, that of our best tile), of the newest lines of one product; None where not timed."""
    timed = [line for line in newest(lines) if "us" in line]
    library = next((line for line in timed if line["tile"] is None), None)
    ours: Line | None = None
    for line in timed:
        is_ours = line["tile"] is not None and line.get("verified") is True
        if is_ours and (ours is None or line[_RATIO] > (1 + NOISE) * ours[_RATIO]):
            ours = line
    return library, ours


def table(lines: Iterable[Line], source: str) -> dict[str, Any] | None:
    """Content of `tuned/<device>.json` (docs/kernels/linear.md) from one device's lines; None where none count."""
    counting = [line for line in lines if line.get("kind") == "gemm" and line.get("gpu") and line["source"] == source]
    if not counting:
        return None
    last = max(counting, key=lambda line: line["time"])
    products: dict[tuple[Any, ...], list[Line]] = {}
    for line in counting:
        if _minor(line) == _minor(last):
            products.setdefault(tuple(line[name] for name in _KEY), []).append(line)
    entries = []
    for key, found in sorted(products.items()):
        library, ours = best(found)
        if library is None:
            continue
        is_ours = ours is not None and ours[_RATIO] > 1
        entries.append({
            **dict(zip(("kind", *_KEY[1:]), key, strict=True)),
            "tile": ours["tile"] if ours is not None and is_ours else None,
            "us": {"library": library["us"], "ours": None if ours is None else ours["us"]},
        })  # fmt: skip
    named = {name: last.get(name) for name in (
        "architecture", "multiprocessors", "triton", "torch", "cuda", "hip", "driver", "commit", "dirty", "time",
    )}  # fmt: skip
    named |= {"tritons": [".".join(_minor(last))]}  # `admit` adds others
    return {"format": 1, "device": last["gpu"], "source": source, **named, "entries": entries} if entries else None


def _minor(line: Line) -> list[str]:
    return str(line["triton"]).split(".")[:2]


def write_tables(results: Path, output: Path | None = None) -> int:
    """Writes the table of every device in the results; 1 where there is none to write."""
    from benchmarks.gemm_tuning.launches import launches_hash
    from bert_fast.triton._gemm_tiles import slug, source_hash

    by_device: dict[str, list[Line]] = {}
    for path in sorted(results.glob("*.jsonl")):
        for line in read_lines(path):
            if line.get("kind") == "gemm" and line.get("gpu"):
                by_device.setdefault(line["gpu"], []).append(line)
    written = 0
    for device, lines in by_device.items():
        made = table(lines, source_hash())
        if made is None:
            print(f"{device}: no results of the present kernels ({source_hash()}): run `make gpu` there")
            continue
        made["launches"] = launches_hash(made["entries"])
        _keep_tritons(made, FOLDER / f"{slug(device)}.json")
        path = (output or FOLDER) / f"{slug(device)}.json"
        path.write_text(dumps(made), encoding="utf-8")
        ours = sum(entry["tile"] is not None for entry in made["entries"])
        print(f"{path.name}: {len(made['entries'])} products, {ours} by our kernel, the others by the library")
        written += 1
    if not by_device:
        print(f"no results of kind gemm from a GPU in {results.name}: nothing was written")
    return 0 if written else 1


def _keep_tritons(made: dict[str, Any], path: Path) -> None:
    """A table that has the entries of the one before it is for the same versions of Triton."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if all(before.get(name) == made[name] for name in ("source", "launches", "entries")):
        made["tritons"] = before["tritons"]


def admit(folder: Path | None = None) -> int:
    """Compiles the tiles of every stored table and says in it whether it is for this Triton; 1 where one is not."""
    import triton

    from benchmarks.gemm_tuning.compiled import problems

    minor, refused = ".".join(triton.__version__.split(".")[:2]), False
    for path in sorted((folder or FOLDER).glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        found = problems(made["entries"], made["architecture"])
        tritons = {*made["tritons"], minor} - ({minor} if found else set())
        made["tritons"] = sorted(tritons, key=lambda version: [int(part) for part in version.split(".")])
        path.write_text(dumps(made), encoding="utf-8")
        print("\n".join([*found, f"{path.name}: for Triton {', '.join(made['tritons'])}"]))
        refused |= bool(found)
    return int(refused)


def dumps(made: dict[str, Any]) -> str:
    """JSON with a line for each entry, so that two tables can be compared line by line."""
    entries = ",\n  ".join(json.dumps(entry) for entry in made["entries"])
    head = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in made.items() if name != "entries")
    return f'{{\n{head} "entries": [\n  {entries}\n ]\n}}\n'
