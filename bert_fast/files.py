"""Files: reading what is one, and writing so that there is the old one or the new one, never half of each."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY_SUFFIX = ".tmp"


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading that is one, or a link to one: a pipe would be waited for, a device may never end.

    Raises:
        OSError: there is nothing, it may not be read, or it is a directory, pipe, socket or device.
    """
    # Without O_NONBLOCK a pipe is opened when another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def path_string(argument: str, path: Any) -> str:
    """`os.fspath(path)` of an argument that is to be a path: where a file is read, it says what is wrong with the name.

    Raises:
        TypeError: it is neither a str nor a path.
    """
    name = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a str or a path, got {type(path).__name__}")
    return name


def path_name(argument: str, path: Any) -> str:
    """`os.fspath(path)` of an argument that is to be a path.

    Raises:
        TypeError: it is neither a str nor a path. ValueError: no file can have this name.
    """
    name = path_string(argument, path)
    if "\0" in name:
        raise ValueError(f"{argument}: expected the name of a file, got one with a NUL character, {name!r}")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(f"{argument}: expected the name of a file, got half of a surrogate pair, {name!r}") from None
    if not name:
        raise ValueError(f"{argument}: expected the name of a file, got ''")
    return name


def create_temporary(path: Path) -> Path:
    """Makes an empty file of a fresh hidden name beside `path` (same file system, so that renaming is atomic).

    Threads and processes never share one, and a link that another process put there is not followed: the name is
    random, and a name that is taken, if only by a link, is an error.

    Raises:
        OSError: no file can be made there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    open(temporary, "xb").close()
    return temporary


def is_temporary(name: str, path: Path) -> bool:
    """Whether a file of this name may be one of `create_temporary(path)`: being written, or of a killed process."""
    return re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}", name) is not None


def sync_directory(directory: Path) -> None:
    """Makes renames in `directory` durable; does nothing where directories cannot be opened (Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def replace_file(temporary: Path, path: Path) -> None:
    """Renames a finished temporary file over `path`; its content is on the disk before its name is."""
    _sync_file(temporary)
    os.replace(temporary, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Waits until no other thread or process is inside of this for the same directory, and keeps them out.

    Where there are no such locks (Windows, some file systems of networks) there is no wait.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # a process that was forked in between has the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file, then renames it to `path`; on any failure `path` is as it was.

    Args:
        path: the file to create or replace (a link itself, not what it points to); its directory must exist.
        write: called with the temporary path, an empty file; whatever it raises is passed on after the temporary file
            is removed.
    """
    temporary = create_temporary(path)
    try:
        write(temporary)
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
