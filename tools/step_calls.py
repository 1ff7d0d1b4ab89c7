"""Counts what a training step costs in Python, and the long argument lists of the sources: numbers that only fall.

    .venv/bin/python -m tools.step_calls            prints them beside those of tests/step_calls.json
    .venv/bin/python -m tools.step_calls --record   writes them down

A step is forward, backward and AdamW of a masked-LM model of two layers, on a padded batch, with dropout. Counted are
calls of functions of bert_fast, the files they lie in, and how often the next call lies in another file. An argument
list is long from eight names on: the lines of it count, in definitions and in calls.
"""

import argparse
import ast
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bert_fast"
RECORD = ROOT / "tests" / "step_calls.json"
LONG = 8

Counts = dict[str, dict[str, int]]


def calls_of(function: Callable[[], Any]) -> dict[str, int]:
    """Calls of the package's functions, their files and changes of file while the function runs."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "changes of file": changes}


def step_calls() -> Counts:
    """Of the parts of one step, after a few that fill every cache."""
    import torch

    from bert_fast import BertConfig, BertForMaskedLM
    from bert_fast.optim import AdamW

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    model = BertForMaskedLM(BertConfig(vocab_size=1000, **sizes)).train()
    optimizer = AdamW(model.parameters())
    words, mask = torch.randint(5, 1000, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    labels = torch.where(torch.arange(16) % 5 == 2, words, -100)
    losses = []

    def forward() -> None:
        losses.append(model(words, attention_mask=mask, labels=labels).loss)

    def backward() -> None:
        losses[-1].backward()

    for _ in range(3):
        forward()
        backward()
        optimizer.step()
    return {part.__name__: calls_of(part) for part in (forward, backward, optimizer.step)}


def argument_lines() -> dict[str, int]:
    """Lines of long argument lists, by the package's folders that know ops."""
    counts = {}
    for folder in ("reference", "torch", "triton", "ops", "modules"):
        lines = 0
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                lines += _lines_of(node)
        counts[folder] = lines
    return counts


def _lines_of(node: ast.AST) -> int:
    names: list[Any] = []
    if isinstance(node, ast.FunctionDef):
        names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    elif isinstance(node, ast.Call):
        names = [*node.args, *node.keywords]
    return names[-1].end_lineno - names[0].lineno + 1 if len(names) >= LONG else 0


def count() -> Counts:
    """All numbers."""
    return step_calls() | {"lines of long argument lists": argument_lines()}


def risen(counts: Counts, recorded: Counts) -> list[str]:
    """What is more than was written down, a line each."""
    return [
        f"{part}: {number} {name}, at most {recorded[part][name]} were written down"
        for part, numbers in counts.items()
        for name, number in numbers.items()
        if number > recorded[part][name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.step_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the numbers down")
    is_recording = parser.parse_args().record
    counts = count()
    if is_recording:
        RECORD.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    for part, numbers in counts.items():
        print(f"{part:<30}" + "".join(f"{name} {n} ({recorded[part][name]})  " for name, n in numbers.items()))
    wrong = risen(counts, recorded)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
