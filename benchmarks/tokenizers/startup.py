"""What a fresh process pays for a tokenizer: the time until it is ready, the memory that it takes and goes on taking.

    python -m benchmarks.tokenizers.startup CONTESTANT [--only-load]

Of bert-base-uncased; CPU time. Importing is told apart from loading: importing bert_fast imports torch. `load_bytes` is
what the resident memory grows by when the tokenizer is made, `used_bytes` that and a pass over 1.7 MB of English in
batches, `growth_bytes` what 8 MB of other texts (English, code, Chinese, 99 languages) then add: the outputs are freed,
and the allocator is told to give back what it keeps.
"""

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
from benchmarks.tokenizers.corpora import CORPORA, UNCASED

BATCH = 128
FIRST_TEXTS = 800  # of the books, 1.7 MB


def measure(name: str, first: list[str], others: list[str]) -> dict[str, Any]:
    """Figures of one contestant in this process, which must have loaded none before; of its use if there are texts."""
    np.zeros(1)  # NumPy is there already
    start = time.process_time()
    importlib.import_module(contestants.module(name))
    imported, before = time.process_time(), resident_bytes()
    begun = time.process_time()
    encode = contestants.load(name, UNCASED)["arrays"]
    found = {"import_ms": (imported - start) * 1e3, "load_ms": (time.process_time() - begun) * 1e3}
    found["load_bytes"] = resident_bytes() - before
    if first:
        _pass(encode, first)
        used = resident_bytes()
        _pass(encode, others)
        found |= {"used_bytes": used - before, "growth_bytes": resident_bytes() - used}
    return found | {"version": contestants.version(name)}


def resident_bytes() -> int:
    """Of this process, after giving back what the allocator keeps."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _pass(encode: Any, texts: list[str]) -> None:
    for i in range(0, len(texts), BATCH):
        encode(texts[i : i + BATCH])


def _texts() -> tuple[list[str], list[str]]:
    books = CORPORA["en_docs"].read()
    others = [text for name in ("code_docs", "zh_docs", "multi_docs") for text in CORPORA[name].read()]
    others = [*books[FIRST_TEXTS:], *others]
    # Every string keeps its UTF-8, as Python does when a C function first asks for it: asking then adds no memory.
    utf8 = ctypes.pythonapi.PyUnicode_AsUTF8
    utf8.argtypes, utf8.restype = [ctypes.py_object], ctypes.c_char_p
    for text in others:
        utf8(text)
    return books[:FIRST_TEXTS], others


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], *(([], []) if "--only-load" in sys.argv else _texts()))))
