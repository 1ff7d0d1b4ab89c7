"""The C++ core where Python programs end or do odd things: exit with daemon threads, sub-interpreters, odd objects."""

import contextlib
import copy
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from .native_core import SMALL_VOCAB, make_native, module, needs_native

pytestmark = needs_native

# The extension alone, without what importing the package costs.
LOAD = """
import importlib.util
spec = importlib.util.spec_from_file_location("bert_fast._native", {file!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""
CALLS: dict[str, tuple[Any, ...]] = {
    "encode": (["a"],),
    "encode_one": ("a",),
    "encode_lists": (["a"],),
    "encode_rows": (["a"], None, 0),
    "normalize": ("a",),
    "pre_tokenize": ("a",),
}


def run(program: str) -> str:
    """What a program of its own prints; it must end well, and in time."""
    assert module is not None
    text = LOAD.format(file=module.__file__) + textwrap.dedent(program)
    finished = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


@pytest.mark.parametrize("call", ["encode_one(text)", "encode_lists([text], None, None, 2)", "__class__(vocabulary)"])
def test_daemon_threads_at_exit(call: str) -> None:
    """Inside the core when the interpreter ends: they do not come back, and the process ends as it should."""
    run(f"""
        import threading, time
        vocabulary = ["[UNK]", *map(str, range(50_000))]
        text = "a 17 b " * 50_000
        engine = native.WordPiece(vocabulary)
        inside = threading.Barrier(3)

        def work():
            inside.wait()
            while True:
                engine.{call}

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        inside.wait()
        time.sleep(0.05)
    """)


def test_sub_interpreters_are_refused() -> None:
    pytest.importorskip("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
    assert module is not None
    load = textwrap.indent(LOAD.format(file=module.__file__), "    ")
    said = run(f"""
        import sys
        if sys.version_info < (3, 13):
            import _xxsubinterpreters as interpreters
        else:
            import _interpreters as interpreters
        for _ in range(2):
            other = interpreters.create()
            interpreters.run_string(other, {f"try:{load}except ImportError as error: print(error)"!r})
            interpreters.destroy(other)
        print(native.WordPiece(["[UNK]", "a"]).encode_one("a"))
    """)
    message = "bert_fast._native works in the main interpreter only, not in a sub-interpreter\n"
    if sys.version_info >= (3, 13):  # Python itself refuses modules that do not say otherwise
        message = "module bert_fast._native does not support loading in subinterpreters\n"
    assert said == 2 * message + "[1]\n"


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_is_not_made_yet(name: str) -> None:
    assert module is not None
    call = getattr(module.WordPiece, name)
    engine = module.WordPiece.__new__(module.WordPiece)
    for make in (lambda: None, lambda: engine.__init__(["no unknown token"])):
        with contextlib.suppress(ValueError):
            make()
        with pytest.raises(TypeError, match=r"WordPiece: __init__\(\) was not called"):
            call(engine, *CALLS[name])
    engine.__init__(SMALL_VOCAB)
    engine.__init__(["[UNK]"])  # a second time: ignored
    call(engine, *CALLS[name])
    assert engine.encode_one("a") == [SMALL_VOCAB.index("a")]
    with pytest.raises(TypeError, match=r"self: expected WordPiece or Unigram, got int|'int' object"):
        call(5, *CALLS[name])


def test_engines_are_neither_copied_nor_derived_from() -> None:
    assert module is not None
    engine = make_native(SMALL_VOCAB)
    attempts = [lambda k=k: pickle.dumps(engine, k) for k in range(pickle.HIGHEST_PROTOCOL + 1)]
    for attempt in (*attempts, lambda: copy.copy(engine), lambda: copy.deepcopy(engine)):
        with pytest.raises(TypeError, match="cannot pickle or copy a WordPiece"):
            attempt()
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (module.WordPiece,), {})
    with pytest.raises(TypeError, match="is not safe"):
        object.__new__(module.WordPiece)
    assert not hasattr(engine, "__dict__")
