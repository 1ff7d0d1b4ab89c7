"""What a fresh process pays for a tokenizer: the time until it is ready, the memory that it takes and goes on taking.

    python -m benchmarks.tokenizers.startup CONTESTANT --tokenizer-json FILE

Of bert-base-uncased; CPU time, and wall time of loading as well. Importing is told apart from loading: importing
bert_fast imports torch. `load_bytes` is what the resident memory grows by when the tokenizer is made, `used_bytes` that
and a pass over 1.7 MB of English in batches, `growth_bytes` what 8 MB of other texts (English, code, Chinese, 99
languages) then add: the outputs are freed, and the allocator is told to give back what it keeps.
"""

import argparse
import ctypes
import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tokenizers import contestants
from benchmarks.tokenizers.corpora import CORPORA

BATCH = 128
FIRST_TEXTS = 800  # of the books, 1.7 MB


def measure(name: str, tokenizer_json: str, texts: dict[str, list[str]]) -> dict[str, Any]:
    """Figures of one contestant in this process, which must have loaded none before.

    texts: "first" and "others", kept by the caller, so that they count as memory of nobody; empty: not used.
    """
    vocabulary = CORPORA["en_docs"].vocabulary
    contestants.provide_tokenizer_json(vocabulary, tokenizer_json)
    np.zeros(1)  # NumPy is there already
    start = time.process_time()
    importlib.import_module(contestants.module(name))
    import_ms = (time.process_time() - start) * 1e3
    before = resident_bytes()
    start, start_wall = time.process_time(), time.perf_counter()
    forms = contestants.load(name, vocabulary)
    load_ms, load_wall_ms = (time.process_time() - start) * 1e3, (time.perf_counter() - start_wall) * 1e3
    found = {
        "import_ms": import_ms,
        "load_ms": load_ms,
        "load_wall_ms": load_wall_ms,
        "load_bytes": resident_bytes() - before,
    }
    if texts:
        _pass(forms, texts["first"])
        used = resident_bytes()
        _pass(forms, texts["others"])
        found |= {"used_bytes": used - before, "growth_bytes": resident_bytes() - used}
    return found


def resident_bytes() -> int:
    """Of this process, after giving back what the allocator keeps."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no VmRSS")


def _pass(forms: contestants.Forms, texts: list[str]) -> None:
    for i in range(0, len(texts), BATCH):
        forms["arrays"](texts[i : i + BATCH])


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenizers.startup", description=__doc__.splitlines()[0]
    )
    parser.add_argument("contestant", choices=contestants.CONTESTANTS)
    parser.add_argument("--tokenizer-json", type=Path, required=True)
    parser.add_argument("--only-load", action="store_true", help="do not use it")
    options = parser.parse_args(arguments)
    texts = {} if options.only_load else _texts()
    figures = measure(options.contestant, options.tokenizer_json.read_text(encoding="utf-8"), texts)
    print(json.dumps(figures | {"version": contestants.version(options.contestant)}))
    return 0


def _texts() -> dict[str, list[str]]:
    books = CORPORA["en_docs"].read()
    others = [
        *books[FIRST_TEXTS:],
        *(text for name in ("code_docs", "zh_docs", "multi_docs") for text in CORPORA[name].read()),
    ]
    _keep_utf8(others)  # a contestant that asks for it then adds nothing
    return {"first": books[:FIRST_TEXTS], "others": others}


def _keep_utf8(texts: list[str]) -> None:
    """Makes every string keep its UTF-8, as Python does when it is first asked for by a C function."""
    utf8 = ctypes.pythonapi.PyUnicode_AsUTF8
    utf8.argtypes, utf8.restype = [ctypes.py_object], ctypes.c_char_p
    for text in texts:
        utf8(text)


if __name__ == "__main__":
    sys.exit(main())
