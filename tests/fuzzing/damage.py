"""Folders of files, and what happens to files: flipped bits, missing ends, other fields, swapped names, links."""

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import Case

Files = dict[str, bytes]  # name -> content


def read_folder(folder: Path) -> Files:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_folder(folder: Path, files: Files) -> None:
    """Writes them."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def damage(case: Case, folder: Path, times: int) -> list[str]:
    """Does that many things to files below the folder; the names of the files that it changed."""
    changed = []
    for _ in range(times):
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if not paths:
            break
        path = case.rng.choice(paths)
        change = case.rng.choice(_CHANGES)
        change(case.rng, path, folder)
        changed.append(path.name)
        case.say(f"# {change.__name__.strip('_')}: {path.relative_to(folder)}")
    return changed


# --- bytes ------------------------------------------------------------------------------------------------------------


def _flip_bits(rng: random.Random, path: Path, folder: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 20)) if content else 0):
        # The beginning holds what decides how the rest is read.
        place = rng.randrange(min(len(content), rng.choice((16, 256, len(content), len(content)))))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(rng: random.Random, path: Path, folder: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice((0, 1, 7, 8, 9, len(content) // 2, max(len(content) - 1, 0)))])


def _lengthen(rng: random.Random, path: Path, folder: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + rng.choice((b"\0", b"x" * 100, content, b"\n", b"{}", b"\xff")))


def _overwrite(rng: random.Random, path: Path, folder: Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content)) if content else 0
    length = rng.choice((1, 4, 8, 64, 512))
    content[start : start + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length), b""))
    path.write_bytes(content)


def _cut_out(rng: random.Random, path: Path, folder: Path) -> None:
    content = path.read_bytes()
    start = rng.randrange(len(content)) if content else 0
    path.write_bytes(content[:start] + content[start + rng.choice((1, 4, 100)) :])


def _replace(rng: random.Random, path: Path, folder: Path) -> None:
    others = (b"", b"null", b"[]", b"{}", b"3", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 100_000, b"\0" * 64)
    path.write_bytes(rng.choice((*others, b'{"a":' * 50_000, b"version https://git-lfs", b"PK\x03\x04", b"\x80\x02}.")))


# --- names ------------------------------------------------------------------------------------------------------------


def _delete(rng: random.Random, path: Path, folder: Path) -> None:
    path.unlink()


def _swap(rng: random.Random, path: Path, folder: Path) -> None:
    """Two files change places, or one stands in both."""
    other = rng.choice(sorted(other for other in folder.rglob("*") if other.is_file()))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    if rng.random() < 0.5:
        other.write_bytes(mine)


def _make_folder(rng: random.Random, path: Path, folder: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(rng: random.Random, path: Path, folder: Path) -> None:
    """A link in the place of a file: to itself, to nothing, out of the folder, to a device, to a folder, to a copy."""
    copy = path.with_name(path.name + ".copy")
    shutil.move(path, copy)
    os.symlink(rng.choice((path, "nothing", "/", "/dev/null", folder, copy, copy.name)), path)


def _rename(rng: random.Random, path: Path, folder: Path) -> None:
    path.rename(path.with_name(rng.choice(("other", path.name.upper(), path.name + ".tmp", "." + path.name))))


# --- fields -----------------------------------------------------------------------------------------------------------

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**70), 10**9, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "../../etc", "/etc/passwd", "a" * 3000, "gelu", "\x1b[31m", [], [1, "a", None], {}),
    *({"a": 1}, [[[]]], {"": ""}, [0] * 40, "12", "float32", [1e400]),
)


def _value(rng: random.Random) -> Any:
    """One that the next case can change without changing it for others."""
    return copy.deepcopy(rng.choice(_VALUES))


def mutated_json(rng: random.Random, value: Any) -> Any:
    """The value with one field changed, added, taken away or given another name."""
    containers = list(_containers(value))
    if not containers or rng.random() < 0.03:
        return _value(rng)
    container = rng.choice(containers[: rng.choice((1, 3, len(containers)))])
    if isinstance(container, list):
        place = rng.randrange(len(container) + 1)
        match rng.randrange(4):
            case 0:
                del container[place : place + 1]
            case 1:
                container.insert(place, _value(rng))
            case 2 if container:
                container.append(container[0])
            case _ if place < len(container):
                container[place] = _value(rng)
        return value
    key = rng.choice(list(container)) if container else ""
    match rng.randrange(8):
        case 0:
            container.pop(key, None)
        case 1:
            container[rng.choice(("", "a", "name", "\x1b[2J", f"{key} "))] = _value(rng)
        case 2 if container:
            container[rng.choice(("", str(key).upper(), "x"))] = container.pop(key)
        case 3 if container:
            container[key] = rng.choice(list(container.values()))
        case 4 if isinstance(container.get(key), int):
            container[key] += rng.choice((-1, 1, 100, 10**12))
        case _:
            container[key] = _value(rng)
    return value


def _containers(value: Any) -> Any:
    if isinstance(value, dict | list):
        yield value
        for item in list(value.values() if isinstance(value, dict) else value)[:50]:
            yield from _containers(item)


def _change_field(rng: random.Random, path: Path, folder: Path) -> None:
    """Of a JSON file, of the header of a safetensors file, of a line of JSON; other files get flipped bits."""
    content = path.read_bytes()
    try:
        if path.suffix == ".safetensors":
            path.write_bytes(_with_other_header(rng, content))
        elif path.suffix == ".jsonl":
            lines = content.splitlines()
            place = rng.randrange(len(lines))
            lines[place] = json.dumps(mutated_json(rng, json.loads(lines[place]))).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            value = json.loads(content)
            for _ in range(rng.choice((1, 1, 2))):
                value = mutated_json(rng, value)
            path.write_text(json.dumps(value))
    except (ValueError, RecursionError, struct.error):
        _flip_bits(rng, path, folder)


def _with_other_header(rng: random.Random, content: bytes) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    text = json.dumps(mutated_json(rng, header)).encode()
    written = len(text) if rng.random() < 0.8 else rng.choice((0, 2**63, 2**64 - 1, len(text) + 1, len(content)))
    return struct.pack("<Q", written) + text + data


_CHANGES: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    *(_flip_bits, _flip_bits, _flip_bits, _truncate, _lengthen, _overwrite, _cut_out, _replace, _delete, _swap),
    *(_make_folder, _link, _rename, *[_change_field] * 12),
)
