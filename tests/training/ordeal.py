"""What becomes of a run and of a token store that are killed, damaged and gone on with, as a table.

OMP_NUM_THREADS=1 python -m tests.training.ordeal
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.errors import CheckpointError, StoreError
from bert_fast.training.checkpoints import CheckpointFolder
from tests.training.test_trainer import Recorder
from tests.training.test_trainer_resume import assert_same, final_state
from tests.training.toy import ToySource, ToyTask
from tests.training.toy_process import start, toy_trainer

STEPS = 12
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "."]


def flip(file: Path, bit: int | None = None) -> None:
    """One bit of a file: by itself one in the middle."""
    content = bytearray(file.read_bytes())
    bit = 8 * (len(content) // 2) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def cut_off(file: Path) -> None:
    """The last tenth of a file is gone."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 9 // 10])


def went_on(run: Path, whole: Path, task: ToyTask | None = None) -> str:
    """What the next start of the same command does."""
    recorder = Recorder()
    try:
        toy_trainer(run, [recorder], task=task or ToyTask()).train()
    except CheckpointError as error:
        text = str(error)
        names = [name for name in ("model.safetensors", "optimizer.pt", "digests.train") if name in text]
        return f"refused, naming {', '.join(names)}"
    notes = recorder.of("note")
    named = "damage named, " if len(notes) > 1 else ""
    step = notes[-1].split()[4].rstrip(",") if notes else "0"
    assert_same(final_state(run, STEPS), final_state(whole, STEPS))
    return f"{named}goes on after step {step}, same bits at the end"


def killed(run: Path, whole: Path, times: int) -> str:
    """kill -9 at moments that nobody chose, while checkpoints are written after every step among them."""
    folder, draw, kills = CheckpointFolder(run / "checkpoints", 2), random.Random(times), 0
    while kills < times:
        before = max(folder.steps(), default=0)
        process = start(run, steps=STEPS, save_every=1, task=ToyTask(), observers=())
        while max(folder.steps(), default=0) <= min(before, STEPS - 2) and process.is_alive():
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        if process.is_alive() and max(folder.steps(), default=0) < STEPS:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if max(folder.steps(), default=0) == STEPS:
            break
    toy_trainer(run, task=ToyTask(), save_every=1).train()
    assert kills, "the run was over before it was killed"
    assert_same(final_state(run, STEPS), final_state(whole, STEPS))
    return "goes on each time, same bits at the end"


def run_cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(what was tried, what happened) of training runs: checkpoints of steps 9 and 12."""
    whole = folder / "whole"
    toy_trainer(whole, task=ToyTask()).train()
    yield "kill -9, up to 5 times, in steps and in saves", killed(folder / "killed", whole, 5)
    tried: list[tuple[str, Callable[[Path, Path], object]]] = []
    for name in ("model.safetensors", "optimizer.pt", "random.pt", "config.json", "state.json"):
        tried.append((f"a bit of {name}", lambda newest, before, name=name: flip(newest / name)))
    tried += [
        ("optimizer.pt cut off", lambda newest, before: cut_off(newest / "optimizer.pt")),
        ("model.safetensors removed", lambda newest, before: (newest / "model.safetensors").unlink()),
        ("state.json removed", lambda newest, before: (newest / "state.json").unlink()),
        ("a bit of both checkpoints", lambda newest, before: [flip(one / "optimizer.pt") for one in (newest, before)]),
    ]
    for number, (what, damage) in enumerate(tried):
        run = shutil.copytree(whole, folder / str(number))
        checkpoints = CheckpointFolder(run / "checkpoints", 2)
        damage(checkpoints.directory(12), checkpoints.directory(9))
        yield f"{what}, resume", went_on(run, whole)
    run = shutil.copytree(whole, folder / "labels")
    source = ToySource()
    source.labels = 1 - source.labels
    yield "flipped labels, resume", went_on(run, whole, ToyTask(source))


def store_cases(folder: Path) -> Iterator[tuple[str, str]]:
    """The same of token stores."""
    text = folder / "x.txt"
    text.write_text("a short text .\n\n" * 500)
    tokenizer = BertTokenizer(WORDS)
    whole = tokenize_files([text], folder / "store", tokenizer).path

    def verify(store: Path) -> None:
        TokenStore.open(store).verify()

    def found(what: Callable[[], object]) -> str:
        try:
            what()
        except StoreError as error:
            return f"damage named ({str(error).partition(': ')[0].rpartition('/')[2]})"
        return "not noticed"

    for name in ("store.json", "tokens.bin", "documents.bin", "sentences.bin"):
        store = shutil.copytree(whole, folder / f"store {name}")
        # A bit of a number; between numbers there are spaces, which mean nothing.
        flip(store / name, 8 * (store / name).read_bytes().index(b"tokens") if name == "store.json" else None)
        yield f"a bit of {name}, open", found(partial(TokenStore.open, store))
        yield f"a bit of {name}, verify", found(partial(verify, store))
    store = shutil.copytree(whole, folder / "cut off")
    cut_off(store / "tokens.bin")
    yield "tokens.bin cut off, open", found(partial(TokenStore.open, store))


def table() -> list[tuple[str, str]]:
    """All that was tried, and what happened."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        return [*run_cases(Path(name)), *store_cases(Path(name))]


if __name__ == "__main__":
    print("| what was done | what happened |\n| --- | --- |")
    for tried, happened in table():
        print(f"| {tried} | {happened} |")
