"""Processes of their own for tests, in a tenth of a second: forked from a server that has imported what they need.

The server has no threads, has computed nothing and keeps the environment with which it began. A worker of the test run
starts one when it first needs one.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


@dataclass
class Finished:
    """How a process ended (minus the signal that ended it) and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def start_server() -> None:
    """Before anything is started by way of `CONTEXT`: the server finds what it imports from the project's folder."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(before)


def run(function: Callable[..., Any], *arguments: Any, folder: Path) -> Finished:
    """A function of a module in a process of its own, in this one's working directory.

    folder: where what it writes is kept meanwhile.
    """
    start_server()
    paths = [folder / f"{name}.of_process" for name in ("stdout", "stderr")]
    process = CONTEXT.Process(target=_write_to, args=(paths, function, arguments))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{function.__name__}{arguments}: not finished after {PATIENCE_S} s")
    return Finished(process.exitcode, *(path.read_text(encoding="utf-8") for path in paths))


def _write_to(paths: list[Path], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for path, stream in zip(paths, (sys.stdout, sys.stderr), strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    function(*arguments)
