"""Surfaces: runs that go on from damaged checkpoints, arguments of training, and the command line."""

import argparse
import contextlib
import functools
import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load

from bert_fast import BertForMaskedLM
from bert_fast.cli import main, tokenize
from bert_fast.cli.arguments import ModelArguments, make_parser
from bert_fast.cli.predict import PredictArguments
from bert_fast.training import TrainingArguments, last_checkpoint
from bert_fast.training.tasks import task_named
from bert_fast.training.tasks.pretraining import PretrainingArguments

from ..data.corpora import make_tokenizer
from ..training.toy import ToySource, toy_trainer
from .case import Case, Finding, place_of
from .damage import Files, damage, mutated_json, read_folder, write_folder
from .examples import example_rows, file_content
from .model_files import small_config
from .tensors import garbage, spoil

# --- checkpoints ------------------------------------------------------------------------------------------------------

_STEPS = 4


def _trainer(folder: Path) -> Any:
    """A run of four steps with a checkpoint after each second one."""
    settings: dict[str, Any] = {"max_steps": _STEPS, "save_steps": 2, "per_device_train_batch_size": 4}
    return toy_trainer(folder, None, ToySource(16), ToySource(6, seed=1), **settings)


@functools.lru_cache(1)
def _finished_run() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        _trainer(Path(folder)).train()
        return read_folder(Path(folder))


def run_resumed(case: Case) -> None:
    """A run goes on from checkpoints with damage; where files are cut off or missing, it ends with the same bits.

    What else may be in the files nothing tells from what was written: then it is one exception, or a run to its end.
    """
    rng, whole = case.rng, _finished_run()
    write_folder(case.folder, whole)
    last = case.folder / f"checkpoint-{rng.choice((2, _STEPS))}"
    if last.name == "checkpoint-2":
        for file in case.folder.glob(f"checkpoint-{_STEPS}/*"):
            file.unlink()
    is_cut = case.chance(0.6)
    if is_cut:
        for file in rng.sample(sorted(last.iterdir()), rng.choice((0, 1, 1, 2))):
            content = file.read_bytes()
            case.say(f"# cut: {file.name}")
            file.write_bytes(content[: rng.choice((0, 1, len(content) // 2, len(content) - 1))])
            if case.chance(0.5):
                file.unlink()
    else:
        damage(case, last, rng.choice((1, 1, 2)))
    found = case.call(last_checkpoint, case.folder)
    torch.default_generator.manual_seed(case.number)
    trainer = _trainer(case.folder)
    case.call(trainer.train, found, any_error=True)
    if is_cut:
        case.expect(trainer.state.global_step == _STEPS, f"a run of {_STEPS} steps ended elsewhere")
        expected = load(whole[f"checkpoint-{_STEPS}/model.safetensors"])
        weights = trainer.model.state_dict()
        same = all(torch.equal(weights[name], expected[name]) for name in expected)
        case.expect(same, "a run that went on from a checkpoint with parts missing ended with other weights")


def run_arguments(case: Case) -> None:
    """`TrainingArguments` of random values: the fields that this library adds to transformers'."""
    rng = case.rng
    tokens = {"per_device_train_batch_tokens": 512, "per_device_eval_batch_tokens": 512}
    values: dict[str, Any] = tokens | {"lamb": True, "graphs": False, "logging_nan_inf_filter": True}
    for name in rng.sample(sorted(values), rng.choice((1, 1, 2))):
        values[name] = rng.choice((spoil(rng, values[name]), garbage(rng), None, True, 0, -1, 2**70, "1", 0.5))
    made = case.call(TrainingArguments, str(case.folder), **values, report_to="none", names=values)
    limits = {**made.batch_limits(True), **made.batch_limits(False)}
    case.expect(all(type(limit) is int and limit > 0 for limit in limits.values()), f"limits of batches: {limits}")


# --- commands ---------------------------------------------------------------------------------------------------------

# The file of each task's examples.
_TASKS = {"classify": "train.tsv", "ner": "train.conll", "qa": "train.squad.json", "choice": "train.jsonl"}
_START = "--model_name_or_path model --output_dir out"
_COMMANDS = (
    *(f"finetune {task} {_START} --train_file {file}" for task, file in _TASKS.items()),
    *(f"finetune {task} {_START} --train_file {file} --validation_file {file}" for task, file in _TASKS.items()),
    *("finetune classify --config run.yaml", "finetune classify --config run.yaml --output_dir out"),
    f"pretrain {_START} --train_file store --no_next_sentence",
    "pretrain --model_name_or_path tiny --output_dir out --tokenizer_name model --train_file text.txt",
    *("predict run train.tsv", "predict run train.tsv --evaluate", "predict run text.txt", "predict run -"),
    *(f"tokenize text.txt -o {store} --tokenizer model --quiet" for store in ("out", "store")),
)
_YAML = ("", "[]", "- " * 5000, "\0", "a: [", "seed: &a [*a]", "!!python/object/apply:os.system ['true']", "\t",
         "max_steps: !!binary x", "? [a]\n: b", "a: " * 3000, "max_steps: 1e400", "x: 0x" + "f" * 99)  # fmt: skip
# Flags of transformers that are tried beside our own; others start loggers, compilers and processes.
_THEIRS = {"learning_rate", "weight_decay", "warmup_steps", "lr_scheduler_type", "seed", "eval_strategy", "eval_steps",
           "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "num_train_epochs", "bf16",
           "per_device_train_batch_size", "per_device_train_batch_tokens", "per_device_eval_batch_tokens", "lamb",
           "graphs", "resume_from_checkpoint", "output_dir"}  # fmt: skip


@functools.lru_cache(1)
def _files() -> Files:
    """A model, examples for every task, a store of tokens and a finished run."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.default_generator.manual_seed(0)
        tokenizer = make_tokenizer()
        config = small_config(vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=1)
        BertForMaskedLM(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for task, file in _TASKS.items():
            rows = example_rows(rng, task, ("w1", "w2p3", "w4"))
            (folder / file).write_bytes(file_content(file.removeprefix("train"), rows))
        sentences = [" ".join(rng.choices(("w1", "w2p3", "w4"), k=5)) for _ in range(6)]
        (folder / "text.txt").write_text("\n".join(sentences) + "\n\n" + "\n".join(sentences) + "\n")
        settings = {"model_name_or_path": "model", "train_file": "train.tsv", "output_dir": "run", "max_steps": 1}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings | {"report_to": "none"}))
        os.chdir(folder)
        for command in ("finetune classify --config run.yaml", "tokenize text.txt -o store --tokenizer model --quiet"):
            status, _, err = _execute(command.split())
            assert status == 0, err
        return read_folder(folder)


def _execute(argv: list[str]) -> tuple[int, str, str]:
    """Exit status and output; argparse's own exit counts as a status. No picture is drawn, which takes a second."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("bert_fast.training.curves.draw_curves"),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "w1 w2"}\n'))),
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
    write_folder(case.folder, _files())
    os.chdir(case.folder)
    if case.chance(0.3):
        data = yaml.safe_load(Path("run.yaml").read_text())
        text = yaml.safe_dump(mutated_json(rng, data)) if case.chance(0.8) else rng.choice(_YAML)
        Path("run.yaml").write_text(text, errors="surrogatepass")
    if case.chance(0.4):
        damage(case, case.folder, rng.choice((1, 2)))
    argv = _command(case)
    case.say(f"bert-fast {' '.join(argv)}")
    try:
        status, out, err = _execute(argv)
    except BaseException as error:
        raise Finding(f"{type(error).__name__} came through main: {error} (at {place_of(error)})") from error
    finally:
        os.chdir(case.folder.parent)
    case.say(f"# exit status {status}\n{out[-1000:]}{err[-1000:]}")
    case.expect("\x1b" not in out + err, "a terminal's escapes in the output")
    case.expect("Traceback" not in err, "a traceback")
    case.expect(status in (0, 1, 2), f"exit status {status}")
    case.expect(not status or "bert-fast" in out + err, f"exit status {status} without a reason: {err}")


@functools.lru_cache(8)
def _flags(command: str, task: str) -> list[argparse.Action]:
    if command == "tokenize":
        parser = argparse.ArgumentParser()
        tokenize.add_arguments(parser)
        return [action for action in parser._actions if action.option_strings and action.dest != "help"]
    kind = PretrainingArguments if command == "pretrain" else task_named(task).Arguments
    classes = (PredictArguments, kind) if command == "predict" else (ModelArguments, kind)
    own = make_parser(command, "", classes)._actions
    theirs = make_parser(command, "", (TrainingArguments,))._actions if command != "predict" else []
    chosen = [*own, *(action for action in theirs if action.dest in _THEIRS)]
    return [action for action in chosen if action.option_strings and action.dest not in ("help", "config")]


def _command(case: Case) -> list[str]:
    """Arguments that would do, then some changed, added or left out."""
    rng = case.rng
    argv = rng.choice(_COMMANDS).split()
    command, task = argv[0], argv[1] if argv[0] == "finetune" else "classify"
    # Of one flag given twice the last counts.
    last = ["--report_to", "none", "--max_steps", "1"] if command in ("finetune", "pretrain") else []
    flags = _flags(command, task)
    for action in rng.sample(flags, min(len(flags), rng.choice((0, 0, 1, 2)))):
        argv += [rng.choice(action.option_strings), *_values(case, action)]
    for _ in range(rng.choice((0, 0, 1))):
        place = rng.randrange(1, len(argv))
        argv[place : place + 1] = rng.choice(([], ["no such"], [""], ["--"], ["-"], ["\udcff"], ["."], ["run.yaml"]))
    return argv + last


_USUAL = {"int": ["1", "2", "8"], "float": ["0.1", "1", "1e-3"], "string_to_bool": ["true", "no"]}


def _values(case: Case, action: argparse.Action) -> list[str]:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return []
    usual = _USUAL.get(getattr(action.type, "__name__", ""), ["1", "model", "train.tsv", "auto", "text"])
    likely = list(action.choices or usual)
    odd = ["0", "-1", "nan", "inf", "1e9", "99999999999999999999", "", "é", "no such", "cuda", "1_0", "0x10"]
    return [str(case.rng.choice(likely if case.chance(0.7) else odd)) for _ in range(case.rng.choice((1, 1, 1, 2)))]
