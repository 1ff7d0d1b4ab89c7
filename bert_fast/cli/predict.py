"""`bert-fast predict`: what a trained model says about examples."""

import dataclasses
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_fast.cli.common import need
from bert_fast.cli.training import is_time
from bert_fast.errors import SourceError
from bert_fast.files import path_name, write_atomically
from bert_fast.hub import fetch_first, is_hub_name
from bert_fast.terminal import printable

_USAGE = "usage: bert-fast predict RUN FILE [--flag value ...]"


@dataclass
class PredictArguments:
    """How examples are asked about."""

    output_file: str | None = field(default=None, metadata={"help": "JSON lines; default: standard output."})
    evaluate: bool = field(
        default=False, metadata={"help": "Print loss and metrics over labelled examples in place of what is said."}
    )
    per_device_eval_batch_tokens: int = field(default=16384, metadata={"help": "Tokens of a batch."})
    bf16: bool = field(default=False, metadata={"help": "Compute in bf16."})


def run(argv: Sequence[str]) -> int:
    """Predicts; returns the exit status."""
    if len(argv) < 2 or argv[0].startswith("-") or (argv[1].startswith("-") and argv[1] != "-"):
        print(
            f"{_USAGE}\n\nPrints what a trained model says about examples.\n\n"
            "RUN   Folder of a fine-tuned model, or its name on the hub.\n"
            "FILE  Examples like those it was trained on; - reads JSON lines from standard input.\n\n"
            "`bert-fast predict RUN FILE --help` lists the flags, which are those of the task."
        )
        return 0 if "-h" in argv or "--help" in argv else 2
    need("'bert_fast[train]'", "transformers", "accelerate", "datasets", "yaml")
    from bert_fast.cli.arguments import check_fit, make_parser, parsed
    from bert_fast.tokenization import load_tokenizer
    from bert_fast.training import Trainer, TrainingArguments
    from bert_fast.training.tasks import task_named

    folder, file, *argv = argv
    name, of_training = _task_of(folder)
    kind = task_named(name)
    parser = make_parser(
        "predict RUN FILE", str(kind.__doc__), (PredictArguments, kind.Arguments), ("train_file", "validation_file")
    )
    known = {field.name for field in dataclasses.fields(kind.Arguments)}
    parser.set_defaults(**{name: value for name, value in of_training.items() if name in known})
    arguments, data = parsed(parser, argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing is an error
        model, report = kind.model_class.from_pretrained(folder, output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(f"{folder}: expected a fine-tuned model, got none of {min(report['missing_keys'])}")
    tokenizer, labels = load_tokenizer(folder), model.config.id2label
    check_fit(model.config, tokenizer, data.max_seq_length)
    if sorted(labels) != [*range(len(labels))]:
        raise ValueError(f"{folder}/config.json: id2label: expected names of 0 to {len(labels) - 1}, got {labels}")
    names = [labels[number] for number in range(len(labels))]
    task = kind(data, tokenizer, labels=names)
    examples = task.read(_stdin() if file == "-" else file, is_labelled=arguments.evaluate)
    with tempfile.TemporaryDirectory() as nowhere:
        settings = TrainingArguments(
            nowhere, per_device_eval_batch_tokens=arguments.per_device_eval_batch_tokens, bf16=arguments.bf16,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, settings, compute_metrics=lambda said: task.metrics(examples, said.predictions, said.label_ids)
        )
        found = trainer.predict(examples, metric_key_prefix="eval")
    rows: Iterable[dict[str, Any]] = task.rows(examples, found.predictions)
    if arguments.evaluate:
        rows = [{name: value for name, value in found.metrics.items() if not is_time(name)}]
    lines = (printable(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    if arguments.output_file is None:
        sys.stdout.writelines(lines)
        sys.stdout.flush()  # a reader that has left is known here
    else:
        _write(arguments.output_file, lines)
    return 0


def _write(file: str, lines: Iterable[str]) -> None:
    """Writes a file as a whole, or not at all; a pipe or a device as it comes."""

    def write(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as output:
            output.writelines(lines)

    path = Path(path_name("output_file", file))
    try:
        write(path) if path.exists() and not path.is_file() else write_atomically(path, write)
    except OSError as error:
        raise OSError(f"output_file: {file} cannot be written: {error.strerror}") from None


def _task_of(folder: str) -> tuple[str, dict[str, Any]]:
    """(the task of a model, how `bert-fast finetune` read its examples)."""
    from bert_fast.training.tasks import TASKS, task_named

    task_of = {task_named(task).model_class.__name__: task for task in TASKS}
    try:
        found = fetch_first(folder, ["config.json"], {}) if is_hub_name(folder) else Path(folder) / "config.json"
        config = json.loads(found.read_text(encoding="utf-8"))
        names, of_training = config.get("architectures") or [], config.get("task_specific_params") or {}
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: expected the folder of a model, got one without config.json") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}/config.json: is damaged: {error}") from None
    if config.get("problem_type") == "multi_label_classification":
        raise ValueError(f"{folder}: expected a model that gives a text one class, got multi_label_classification")
    for name in names:
        if name in task_of:
            how = of_training.get(task_of[name]) if isinstance(of_training, dict) else None
            return task_of[name], how if isinstance(how, dict) else {}
    raise ValueError(f"{folder}: expected a model of {', '.join(task_of)}, got {', '.join(names) or 'none'}")


def _stdin() -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"-: line {number}: expected a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise SourceError(f"-: line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows
