"""Files that are either the old one or the new one, never half of each."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

__all__ = ["TEMPORARY_SUFFIX", "replace_file", "sync_directory", "temporary_path", "write_atomically"]

TEMPORARY_SUFFIX = ".tmp"


def temporary_path(path: Path) -> Path:
    """A fresh hidden name beside `path` (same file system, so that renaming is atomic)."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def sync_directory(directory: Path) -> None:
    """Makes renames in `directory` durable; does nothing where directories cannot be opened (Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(temporary: Path, path: Path) -> None:
    """Renames a finished temporary file over `path`; its content is on the disk before its name is."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file, then renames it to `path`; on any failure `path` is as it was.

    Args:
        path: the file to create or replace; its directory must exist.
        write: called with the temporary path; whatever it raises is passed on after the temporary file is removed.
    """
    temporary = temporary_path(path)
    try:
        write(temporary)
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
