"""Instructions, estimated cycles and mispredicted branches per byte of new English text, counted by callgrind.

    python -m benchmarks.tokenizers.instructions CONTESTANT --texts N     what callgrind runs

Two runs that differ in the number of texts are subtracted, so that start-up does not count; warm caches, as the texts
that both have come first. The core alone is counted, without `BertTokenizer` (importing it imports torch). Callgrind
knows no AVX-512: the core takes its AVX2 path there. Estimated cycles are callgrind's: instructions, 10 for a
mispredicted branch or a miss of the first cache, 100 for one of the last.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kit.record import ROOT
from benchmarks.tokenizers import contestants
from benchmarks.tokenizers.corpora import CORPORA, slices
from benchmarks.tokenizers.environment import thread_environment

FEW, MANY = 100, 400  # documents of 2 KB
CORPUS = "en_docs"


def why_not() -> str | None:
    """Why nothing can be counted here, or None."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    if _native_file() is None:
        return "the C++ extension is not built"
    return None


def count(name: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """Events per byte of one contestant. RuntimeError if callgrind fails, with what it said."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tokenizer.json"
        source.write_text(contestants.tokenizer_json(CORPORA[CORPUS].vocabulary), encoding="utf-8")
        outputs = {texts: Path(folder) / f"callgrind.{texts}" for texts in (FEW, MANY)}
        started = [_start(name, texts, source, output) for texts, output in outputs.items()]
        for process in started:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                for other in started:
                    other.kill()
                    other.wait()
                raise RuntimeError(f"callgrind, {name}: not done after {timeout_s:.0f} s") from None
            if process.returncode != 0:
                raise RuntimeError(f"callgrind, {name}: {said[-500:]}")
        few, many = (read_events(output.read_text(encoding="utf-8")) for output in outputs.values())
    texts = _texts(MANY)
    return per_byte(few, many, sum(len(text.encode()) for text in texts[FEW:]))


def per_byte(few: dict[str, int], many: dict[str, int], num_bytes: int) -> dict[str, float]:
    """Figures of the difference of two runs."""
    more = {event: many[event] - few[event] for event in many}
    missed = more["Bcm"] + more["Bim"]
    first = more["I1mr"] + more["D1mr"] + more["D1mw"]
    last = more["ILmr"] + more["DLmr"] + more["DLmw"]
    return {
        "instructions_per_byte": round(more["Ir"] / num_bytes, 2),
        "estimated_cycles_per_byte": round((more["Ir"] + 10 * (missed + first) + 100 * last) / num_bytes, 2),
        "mispredicted_per_kb": round(missed / num_bytes * 1e3, 2),
        "first_cache_misses_per_kb": round(first / num_bytes * 1e3, 2),
    }


def read_events(output: str) -> dict[str, int]:
    """Totals of a callgrind file by event. ValueError if they are not in it."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, values = line.partition(":")
        if key in ("events", "summary", "totals"):
            found[key] = values.split()
    totals = found.get("totals") or found.get("summary")
    if totals is None or "events" not in found:
        raise ValueError("callgrind's file: no events or totals in it")
    return dict(zip(found["events"], map(int, totals), strict=False))


def _start(name: str, texts: int, source: Path, output: Path) -> "subprocess.Popen[str]":
    tool = ["valgrind", "--tool=callgrind", "--cache-sim=yes", "--branch-sim=yes", f"--callgrind-out-file={output}"]
    module = [sys.executable, "-m", "benchmarks.tokenizers.instructions", name, "--texts", str(texts)]
    # A hash seed: dictionaries of both runs then cost the same.
    environment = os.environ | thread_environment(1) | {"PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [*tool, *module, "--tokenizer-json", str(source)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _texts(count: int) -> list[str]:
    return slices(CORPORA[CORPUS].read(), 1, seed=0)[0][:count]


def _native_file() -> Path | None:
    """The extension's file, found without importing the package."""
    spec = importlib.util.find_spec("bert_fast")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () for path in Path(folder).glob("_native*.so")), None)


def _core() -> Any:
    """`encode` of the core, without importing bert_fast."""
    file = _native_file()
    assert file is not None, "the C++ extension is not built"
    spec = importlib.util.spec_from_file_location("bert_fast._native", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vocabulary = CORPORA[CORPUS].vocabulary
    tokens = vocabulary.path.read_text(encoding="utf-8").splitlines()
    core = module.WordPiece(tokens, lowercase=vocabulary.lowercase)
    return lambda texts: core.encode(texts, num_threads=1)


def main(arguments: list[str] | None = None) -> int:
    """Command line: encodes the first texts, one batch after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizers.instructions")
    parser.add_argument("contestant", choices=contestants.CONTESTANTS)
    parser.add_argument("--texts", type=int, required=True)
    parser.add_argument("--tokenizer-json", type=Path, required=True)
    options = parser.parse_args(arguments)
    vocabulary = CORPORA[CORPUS].vocabulary
    contestants.provide_tokenizer_json(vocabulary, options.tokenizer_json.read_text(encoding="utf-8"))
    # Both runs read all texts: reading is no part of the difference.
    texts = _texts(MANY)[: options.texts]
    encode = (
        _core() if options.contestant == "bert_fast" else contestants.load(options.contestant, vocabulary)["arrays"]
    )
    for i in range(0, len(texts), 100):
        encode(texts[i : i + 100])
    return 0


if __name__ == "__main__":
    sys.exit(main())
