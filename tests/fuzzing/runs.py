"""Surfaces: runs that go on from damaged checkpoints, settings of training, and the command line."""

import argparse
import contextlib
import functools
import io
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load

from bert_fast import BertForMaskedLM, BertTokenizer
from bert_fast.cli import evaluate, finetune, main, predict, pretrain, report, tokenize
from bert_fast.training import Trainer, TrainingConfig
from bert_fast.training.observers import Observer

from ..training.toy import ToySource, ToyTask, toy_config, toy_model
from .case import Case, Finding, place_of
from .damage import Files, damage, mutated_json, read_folder, write_folder
from .model_files import small_config
from .tensors import spoil

__all__ = ["run_commands", "run_resumed", "run_settings"]


class _NoPage(Observer):
    """In place of the page of a run, whose plots take seconds."""

    def __init__(self, *_: Any) -> None:
        pass


# --- checkpoints ------------------------------------------------------------------------------------------------------

_STEPS = 4


def _trainer(folder: Path, **changes: Any) -> Trainer:
    """A run of four steps with a checkpoint after each second one; `changes` are to its configuration."""
    settings = {"steps": _STEPS, "save_every": 2, "eval_every": 2, "log_every": 2, "batch_size": 4} | changes
    task = ToyTask(ToySource(16), ToySource(6, seed=1))
    return Trainer(toy_model(), task, toy_config(folder, **settings), observers=())


@functools.lru_cache(2)
def _finished_run(steps: int) -> Files:
    """The directory of such a run after so many steps, as one that was killed then left it."""
    with tempfile.TemporaryDirectory() as folder:
        _trainer(Path(folder)).train()
        files = read_folder(Path(folder))
    if steps < _STEPS:
        files = {name: content for name, content in files.items() if f"step-{_STEPS:08d}" not in name}
    return files


def run_resumed(case: Case) -> None:
    """A run goes on in a directory with damage: it ends with the bits of a run without any, or refuses."""
    rng, steps = case.rng, case.rng.choice((2, _STEPS))
    write_folder(case.folder, _finished_run(steps))
    place = case.folder / "checkpoints" if case.chance(0.8) else case.folder
    changed = damage(case, place, rng.choice((0, 1, 1, 1, 2)))
    changes: dict[str, Any] = {}
    if case.chance(0.1):
        changes = rng.choice(({"seed": 3}, {"learning_rate": 1e-2}, {"batch_size": 5}, {"keep_checkpoints": 1}))
    torch.default_generator.manual_seed(case.number)
    trainer = _trainer(case.folder, **changes)
    mode = rng.choice(("auto", "auto", "must", "never"))
    result = case.call(trainer.train, mode, names=("resume", "output_dir", *changes))
    case.expect(result.step == _STEPS, f"a run of {_STEPS} steps ended after {result.step}")
    if changes.keys() <= {"keep_checkpoints"}:
        whole, last = _finished_run(_STEPS), f"checkpoints/step-{_STEPS:08d}"
        best = json.loads(whole[f"{last}/state.json"])["progress"]["best_step"]
        # Where the best weights are damaged the run says so, and the last ones take their place.
        chosen = "model" if result.best_step == best else last
        for name, source in (("model/model.safetensors", chosen), (f"{last}/model.safetensors", last)):
            mine, expected = load((case.folder / name).read_bytes()), load(whole[f"{source}/model.safetensors"])
            same = mine.keys() == expected.keys() and all(torch.equal(mine[key], expected[key]) for key in mine)
            case.expect(same, f"after damage of {changed}, {name} ended with other weights")


def run_settings(case: Case) -> None:
    """`TrainingConfig` of random values."""
    rng = case.rng
    values = dict(vars(TrainingConfig(output_dir=case.folder / "run", steps=2)))
    for name in rng.sample(sorted(values), rng.choice((1, 1, 2, 3))):
        values[name] = spoil(rng, values[name]) if case.chance(0.5) else rng.choice(_SETTINGS)
    if case.chance(0.05):
        values[rng.choice(("lr", "", "device"))] = 1
    case.call(TrainingConfig, **{name: value for name, value in values.items() if name.isidentifier()})


_SETTINGS: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        1,
        -1,
        2,
        0.5,
        1.0,
        1e9,
        2**40,
        float("nan"),
        float("inf"),
        "",
        "linear",
        "cosine",
        "adamw",
        "lamb",
    ),
    *("bf16", "fp16", "full", "1", (0.9, 0.99), (1.0, 2.0), [], Path("x"), object()),
)


# --- commands ---------------------------------------------------------------------------------------------------------

_WORDS = ["a", "film", "was", "good", "bad", "who", "lives", "in", "Oslo", "John", "Mary", "ran", ".", "?"]


@functools.lru_cache(1)
def _files() -> Files:
    """A model, examples for every task, a store of tokens and finished runs."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name, _inside(name):
        folder = Path(name)
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
        torch.default_generator.manual_seed(0)
        config = small_config(vocab_size=len(vocabulary), max_position_embeddings=512, num_hidden_layers=1)
        BertForMaskedLM(config).save_pretrained(folder / "model")
        BertTokenizer(vocabulary, do_lower_case=False).save_pretrained(folder / "model")
        sentences = [" ".join(rng.choices(_WORDS, k=5)) for _ in range(12)]
        labels = ["yes" if index % 2 else "no" for index in range(12)]
        rows = [f"{text}\t{label}\n" for text, label in zip(sentences, labels, strict=True)]
        (folder / "train.tsv").write_text("text\tlabel\n" + "".join(rows))
        words = "".join(f"{word}\t{'B-PER' if word == 'John' else 'O'}\n" for word in _WORDS)
        (folder / "train.conll").write_text(words + "\n" + words)
        paragraphs = [
            {"context": "John lives in Oslo .", "qas": [{"id": f"q{index}", "question": "who lives ?",
             "answers": [{"text": "John", "answer_start": 0}]}]}
            for index in range(4)
        ]  # fmt: skip
        (folder / "train.json").write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
        choices = [{"sent1": "John", "sent2": "Mary", "ending0": "ran", "ending1": "was", "label": 0} for _ in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
        (folder / "text.txt").write_text("\n".join(sentences[:6]) + "\n\n" + "\n".join(sentences[6:]) + "\n")
        settings = {"model": "model", "train": "train.tsv", "output_dir": "run", "steps": 1, "batch_size": 2}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        for argv in (
            ["finetune", "classify", "--config", "run.yaml", "--quiet", "--log-every", "1"],
            ["tokenize", "text.txt", "-o", "store", "--tokenizer", "model", "--quiet"],
        ):
            status, _, err = _execute(argv)
            assert status == 0, err
        return read_folder(folder)


@contextlib.contextmanager
def _inside(folder: str) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _execute(argv: list[str]) -> tuple[int, str, str]:
    """Exit status and output; argparse's own exit counts as a status."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("bert_fast.training.reporting.ReportPage", _NoPage),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the film was good\n"))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main.main(argv)
        except SystemExit as error:
            status = int(error.code or 0)
    return status, out.getvalue(), err.getvalue()


def run_commands(case: Case) -> None:
    """A command with random flags, in a folder of files some of which are damaged."""
    rng = case.rng
    with _inside(str(case.folder)):
        write_folder(case.folder, _files())
        if case.chance(0.3):
            data = yaml.safe_load((case.folder / "run.yaml").read_text())
            text = yaml.safe_dump(mutated_json(rng, data)) if case.chance(0.8) else rng.choice(_YAML)
            (case.folder / "run.yaml").write_text(text, errors="surrogatepass")
        if case.chance(0.4):
            damage(case, case.folder, rng.choice((1, 2)))
        argv = _command(case)
        case.say(f"bert-fast {' '.join(argv)}")
        try:
            status, out, err = _execute(argv)
        except BaseException as error:
            raise Finding(f"{type(error).__name__} came through main: {error} (at {place_of(error)})") from error
        case.say(f"# exit status {status}\n{out[-1000:]}{err[-1000:]}")
        case.expect("\x1b" not in out + err, "a terminal's escapes in the output")
        case.expect("Traceback" not in err, "a traceback")
        case.expect(status in (0, 1, 2), f"exit status {status}")
        if status:
            given = [word for word in argv if len(word) > 2] + sorted(_files())
            names = [*given, *(Path(word).name for word in given), "-", "argument", "model", "train", "text", "label"]
            case.expect(err and any(name in err for name in names), f"exit status {status} without a reason: {err}")


_YAML = (
    "",
    "[]",
    "- " * 5000,
    "\0",
    "a: [",
    "model: &a [*a]",
    "!!python/object/apply:os.system ['true']",
    "steps: !!binary x",
    "\t",
    "? [a]\n: b",
    "model: model\nmodel: other\n",
    "a: " * 3000,
    "steps: 1e400",
    "x: 0x" + "f" * 99,
)
_TASKS = {"classify": "train.tsv", "ner": "train.conll", "qa": "train.json", "choice": "train.jsonl"}


@functools.lru_cache(8)
def _flags(command: str, task: str = "") -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    modules = {"evaluate": evaluate, "predict": predict, "pretrain": pretrain, "report": report,
               "tokenize": tokenize, "finetune": finetune}  # fmt: skip
    modules[command].add_arguments(parser)
    if task:
        (choice,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = choice.choices[task]
    return [action for action in parser._actions if action.option_strings and "--help" not in action.option_strings]


def _command(case: Case) -> list[str]:
    """Arguments that would do, then some changed, added or left out."""
    rng = case.rng
    command = rng.choice(("finetune", "finetune", "finetune", "pretrain", "evaluate", "predict", "report", "tokenize"))
    task, steps = "", ["--steps", "1", "--batch-size", "2", "--quiet"]
    if case.chance(0.6):
        steps.append("--dry-run")
    if command == "finetune":
        task = rng.choice(sorted(_TASKS))
        argv = [command, task, "--model", "model", "--train", _TASKS[task], "--output-dir", "out", *steps]
        if task == "classify" and case.chance(0.4):
            argv = [command, task, "--config", "run.yaml", "--quiet", *rng.choice(((), ("--dry-run",)))]
    elif command == "pretrain":
        argv = [
            command,
            "--model",
            "model",
            "--train",
            rng.choice(("text.txt", "store")),
            "--output-dir",
            "out",
            *steps,
        ]
    elif command in ("evaluate", "predict"):
        argv = [command, "run", rng.choice(("train.tsv", "text.txt", "-"))]
    elif command == "report":
        argv = [command, "run"]
    else:
        argv = [command, "text.txt", "-o", rng.choice(("out", "store")), "--tokenizer", "model", "--quiet"]
    flags = _flags(command, task)
    for action in rng.sample(flags, min(len(flags), rng.choice((0, 0, 1, 2)))):
        argv += [rng.choice(action.option_strings), *_values(case, action)]
    for _ in range(rng.choice((0, 0, 1))):
        place = rng.randrange(1, len(argv))
        argv[place : place + 1] = rng.choice(
            ([], ["no such"], [""], ["--"], ["-"], ["\udcff"], ["/"], ["."], ["run.yaml"])
        )
    return argv


def _values(case: Case, action: argparse.Action) -> list[str]:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return []
    likely = list(action.choices) if action.choices else ["1", "2", "8", "0.1", "model", "train.tsv", "auto", "text"]
    odd = ["0", "-1", "nan", "inf", "1e9", "99999999999999999999", "", "é", "no such", "cuda", "1_0", "0x10"]
    return [str(case.rng.choice(likely if case.chance(0.7) else odd)) for _ in range(case.rng.choice((1, 1, 1, 2)))]
