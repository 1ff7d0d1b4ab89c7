"""`bert-fast predict`: what a trained model says about examples."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_fast.cli.training import one_line
from bert_fast.errors import SourceError
from bert_fast.terminal import printable

__all__ = ["PredictArguments", "run"]

_USAGE = "usage: bert-fast predict RUN FILE [--flag value ...]"
_ARCHITECTURES = {
    "BertForSequenceClassification": "classify",
    "BertForTokenClassification": "ner",
    "BertForQuestionAnswering": "qa",
    "BertForMultipleChoice": "choice",
}


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
    """Predicts; returns 0, 1 where a file or an example is wrong."""
    if len(argv) < 2 or argv[0].startswith("-") or (argv[1].startswith("-") and argv[1] != "-"):
        print(
            f"{_USAGE}\n\nRUN: folder of a fine-tuned model. FILE: examples as those it was trained on; -: JSON lines "
            "of standard input. Flags are those of the task: bert-fast predict RUN FILE --help"
        )
        return 0 if "-h" in argv or "--help" in argv else 2
    return one_line("predict", lambda: _run(argv[0], argv[1], argv[2:]))


def _run(folder: str, file: str, argv: Sequence[str]) -> int:
    from bert_fast.cli.arguments import make_parser, parsed
    from bert_fast.training import Trainer, TrainingArguments
    from bert_fast.training.tasks import task_named

    kind = task_named(_task_of(folder))
    parser = make_parser("predict RUN FILE", str(kind.__doc__), (PredictArguments, kind.Arguments))
    arguments, data = parsed(parser, argv)
    model = kind.model_class.from_pretrained(folder)
    from bert_fast.tokenization import load_tokenizer

    names = [model.config.id2label[number] for number in range(len(model.config.id2label))]
    task = kind(data, load_tokenizer(folder), labels=names)
    examples = task.read(_stdin() if file == "-" else file, is_labelled=arguments.evaluate)
    with tempfile.TemporaryDirectory() as nowhere:
        settings = TrainingArguments(
            nowhere, per_device_eval_batch_tokens=arguments.per_device_eval_batch_tokens, bf16=arguments.bf16,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, compute_metrics=lambda said: task.metrics(examples, *said[:2]))
        found = trainer.predict(examples, metric_key_prefix="eval")
    rows: Any = task.rows(examples, found.predictions)
    if arguments.evaluate:
        rows = [{name: value for name, value in found.metrics.items() if "per_second" not in name}]
    with contextlib.ExitStack() as stack:
        output: Any = sys.stdout
        if arguments.output_file is not None:
            output = stack.enter_context(open(arguments.output_file, "w", encoding="utf-8"))
        for row in rows:
            output.write(printable(json.dumps(row, ensure_ascii=False)) + "\n")
    return 0


def _task_of(folder: str) -> str:
    try:
        names = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: expected the folder of a model, got one without config.json") from None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json: is damaged: {error}") from None
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise ValueError(f"{folder}: expected a model of {', '.join(_ARCHITECTURES)}, got {', '.join(names) or 'none'}")


def _stdin() -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"-: line {number}: expected a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise SourceError(f"-: line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows
