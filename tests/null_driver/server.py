"""Commands over the null driver, each in a process of its own, forked from one that has imported what takes seconds.

`run_command` starts that one, `python -m tests.null_driver.server`, when it is first called. bert_fast is not imported
there, and nothing is launched: a process has one device, and bert_fast once imported has the answers of one.
"""

import contextlib
import functools
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tools.null_driver import build

ROOT = Path(__file__).resolve().parents[2]
CLEARED = ("TRITON_INTERPRET", "BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH")


def run(scenario: str, device: str = "sm_90", *, with_bodies: bool = True) -> Any:
    """Returns what a scenario found.

    with_bodies: of kernels. Scenarios that look at names, grids and parameters of launches run faster without.
    """
    options = [] if with_bodies else ["--empty-kernels"]
    return json.loads(run_command("tests.null_driver.scenarios", scenario, device, *options).splitlines()[-1])


def run_command(module: str, *arguments: str) -> str:
    """What the `main` of a module writes, with these arguments of the command line."""
    reason = build.missing()
    if reason is not None:
        pytest.skip(reason)
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps([module, arguments, folder]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], PATIENCE_S)[0]:
            server.kill()
            _server.cache_clear()
            raise TimeoutError(f"{module} {' '.join(arguments)}: not finished after {PATIENCE_S} s")
        status = server.stdout.readline()
        stdout, stderr = ((Path(folder) / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert status == "0\n", stderr
    return stdout


@functools.cache
def _server() -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name not in CLEARED}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.null_driver.server"], cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def main() -> None:
    """For each line of stdin (module, arguments, folder for what is written) a process, and its exit status."""
    importlib.import_module("tests.null_driver.scenarios")
    importlib.import_module("tools.null_driver.rehearsal")
    with contextlib.suppress(ImportError):
        from transformers import (  # noqa: F401  what `tools/null_driver/steps.py` makes steps of
            BertForPreTraining,
            BertForQuestionAnswering,
            BertForSequenceClassification,
            BertForTokenClassification,
        )
    assert "bert_fast" not in sys.modules
    for line in sys.stdin:
        module, arguments, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(module, arguments, Path(folder)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _in_child(module: str, arguments: list[str], folder: Path) -> int:
    """The exit status."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [module, *arguments]
    try:
        status = importlib.import_module(module).main() or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
