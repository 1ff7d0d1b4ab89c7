"""The same recipes with transformers alone: its models, tokenizers, collators and Trainer.

Both sides begin with the same weights, the new head's included: those that our side draws from the seed.
"""

import csv
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.recipes.cases import Recipe, as_words, cost, figures
from bert_fast.cli.arguments import ModelArguments, make_parser, parsed
from bert_fast.training import TrainingArguments
from bert_fast.training.tasks import task_named

Rows = list[dict[str, Any]]
Scores = dict[str, float]


@dataclass(frozen=True)
class _Question:
    """A question, its context, the right answers and the first character of the first one."""

    question: str
    context: str
    answers: tuple[str, ...]
    answer_start: int


@dataclass(frozen=True)
class Parts:
    """What a Trainer takes: rows to train on and to judge by, what joins them, and metrics of scores and labels."""

    train: Rows
    valid: Rows
    collator: Any
    scores: Callable[[Any], Scores]


def their_run(recipe: Recipe, flags: dict[str, Any]) -> dict[str, Any]:
    """As `cases.our_run`; `padded_tokens` are those of the batches, padding counted."""
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory) / "start"
        name, data = _save_start(recipe.task, flags, start)
        begun = time.perf_counter(), time.process_time()
        tokenizer = transformers.AutoTokenizer.from_pretrained(start)
        model = getattr(transformers, name).from_pretrained(start, attn_implementation="sdpa")
        parts = _PARTS[recipe.task](data, tokenizer, model)
        trainer = _CountingTrainer(
            model,
            _arguments(flags, Path(directory)),
            data_collator=parts.collator,
            train_dataset=parts.train,
            eval_dataset=parts.valid,
            compute_metrics=parts.scores,
            processing_class=tokenizer,
        )
        trainer.train()
        taken = cost(*begun)
        log = trainer.state.log_history
    return {
        "metrics": figures(next(line for line in reversed(log) if "eval_loss" in line)),
        "steps": trainer.state.global_step,
        "tokens": trainer.tokens,
        "padded_tokens": trainer.padded_tokens,
        **taken,
    }


def _save_start(task: str, flags: dict[str, Any], folder: Path) -> tuple[str, Any]:
    """Saves the model and the tokenizer that the command begins with; (the model's class, arguments of the task)."""
    kind = task_named(task)
    parser = make_parser(f"finetune {task}", "", (ModelArguments, kind.Arguments, TrainingArguments))
    arguments, data, _ = parsed(parser, as_words(flags))
    transformers.set_seed(flags["seed"])
    tokenizer = arguments.tokenizer()
    ours = kind(data, tokenizer)
    ours.read(data.train_file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left at their initial values")  # the head
        model = kind.model_class.from_pretrained(arguments.model_name_or_path, dtype=torch.float32, **ours.config())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return kind.model_class.__name__, data


def _arguments(flags: dict[str, Any], directory: Path) -> transformers.TrainingArguments:
    known = {field.name for field in fields(transformers.TrainingArguments)}
    same = {name: value for name, value in flags.items() if name in known}
    own = {
        "output_dir": str(directory / "run"), "per_device_eval_batch_size": 64, "eval_strategy": "epoch",
        "save_strategy": "epoch", "save_total_limit": 2, "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**same | own)


class _CountingTrainer(transformers.Trainer):
    """A Trainer that counts the tokens that it learns from."""

    tokens = padded_tokens = 0

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        self.tokens += int(inputs["attention_mask"].sum())
        self.padded_tokens += inputs["attention_mask"].numel()
        return super().training_step(model, inputs, *arguments, **options)


def _classify(data: Any, tokenizer: Any, model: Any) -> Parts:
    from sklearn import metrics

    numbers = {label: number for number, label in model.config.id2label.items()}

    def rows(path: str) -> Rows:
        found = _columns(path, data.text_column_name, data.label_column_name)
        tokens = tokenizer([text for text, _ in found], truncation=True, max_length=data.max_seq_length)
        return _rows(tokens, labels=[numbers[label] for _, label in found])

    def scores(said: Any) -> Scores:
        answers, labels = said.predictions.argmax(axis=1), said.label_ids
        return {
            "accuracy": metrics.accuracy_score(labels, answers),
            "f1": metrics.f1_score(labels, answers),
            "matthews_correlation": metrics.matthews_corrcoef(labels, answers),
        }

    collator = transformers.DataCollatorWithPadding(tokenizer)
    return Parts(rows(data.train_file), rows(data.validation_file), collator, scores)


def _ner(data: Any, tokenizer: Any, model: Any) -> Parts:
    from seqeval import metrics

    names = model.config.id2label
    numbers = {label: number for number, label in names.items()}

    def rows(path: str) -> Rows:
        found = _sentences(path, data.label_column)
        words, tags = ([row[part] for row in found] for part in (0, 1))
        tokens = tokenizer(words, is_split_into_words=True, truncation=True, max_length=data.max_seq_length)
        labels = []
        for sentence, its_tags in enumerate(tags):
            origins = tokens.word_ids(sentence)
            firsts = [
                word is not None and word != before for word, before in zip(origins, [None, *origins], strict=False)
            ]
            labels.append([
                numbers[its_tags[word]] if first else -100 for word, first in zip(origins, firsts, strict=True)
            ])  # fmt: skip
        return _rows(tokens, labels=labels)

    def scores(said: Any) -> Scores:
        answers = said.predictions.argmax(axis=2)
        gold, given = [], []
        for kept, labels, answer in zip(said.label_ids != -100, said.label_ids, answers, strict=True):
            gold.append([names[number] for number in labels[kept]])
            given.append([names[number] for number in answer[kept]])
        return {
            "f1": metrics.f1_score(gold, given),
            "precision": metrics.precision_score(gold, given),
            "recall": metrics.recall_score(gold, given),
        }

    collator = transformers.DataCollatorForTokenClassification(tokenizer)
    return Parts(rows(data.train_file), rows(data.validation_file), collator, scores)


def _qa(data: Any, tokenizer: Any, model: Any) -> Parts:
    from torchmetrics.functional.text import squad

    train, valid = _questions(data.train_file), _questions(data.validation_file)
    train_rows, _, _ = _windows(train, data, tokenizer)
    valid_rows, spans, owners = _windows(valid, data, tokenizer)

    def scores(said: Any) -> Scores:
        best: dict[int, tuple[float, str]] = {}
        for start, end, its_spans, owner in zip(*said.predictions[:2], spans, owners, strict=True):
            score, text = _best_span(start, end, its_spans, valid[owner].context, data.max_answer_length)
            if owner not in best or score > best[owner][0]:
                best[owner] = (score, text)
        said = [{"id": str(number), "prediction_text": best[number][1]} for number in range(len(valid))]
        right: list[Any] = [
            {"id": str(number), "answers": {"text": list(question.answers)}} for number, question in enumerate(valid)
        ]
        return {name: float(value) / 100 for name, value in squad(said, right).items()}

    collator = transformers.DataCollatorWithPadding(tokenizer)
    return Parts(train_rows, valid_rows, collator, scores)


def _windows(
    questions: list[_Question], data: Any, tokenizer: Any
) -> tuple[Rows, list[list[tuple[int, int] | None]], list[int]]:
    """(rows, characters of every token of a context and None for others, question of every row)."""
    tokens = tokenizer(
        [question.question for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=data.max_seq_length,
        stride=data.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = tokens.pop("overflow_to_sample_mapping")
    spans = [
        [span if part == 1 else None for span, part in zip(its_spans, tokens.sequence_ids(row), strict=True)]
        for row, its_spans in enumerate(tokens.pop("offset_mapping"))
    ]
    starts, ends = [], []
    for its_spans, owner in zip(spans, owners, strict=True):
        first = questions[owner].answer_start
        last = first + len(questions[owner].answers[0])
        inside = [place for place, span in enumerate(its_spans) if span and span[1] > first and span[0] < last]
        whole = bool(inside) and its_spans[inside[0]][0] <= first and its_spans[inside[-1]][1] >= last  # type: ignore[index]
        starts.append(inside[0] if whole else 0)
        ends.append(inside[-1] if whole else 0)
    return _rows(tokens, start_positions=starts, end_positions=ends), spans, owners


def _best_span(
    start: np.ndarray, end: np.ndarray, spans: list[tuple[int, int] | None], context: str, longest: int
) -> tuple[float, str]:
    """The most likely span of a window among the 20 best beginnings and ends."""
    best = (-np.inf, "")
    firsts, lasts = (np.argsort(-scores[: len(spans)])[:20] for scores in (start, end))
    for first in firsts:
        for last in lasts:
            if spans[first] is None or spans[last] is None or not first <= last < first + longest:
                continue
            score = float(start[first] + end[last])
            if score > best[0]:
                best = (score, context[spans[first][0] : spans[last][1]])
    return best


def _choice(data: Any, tokenizer: Any, model: Any) -> Parts:
    def rows(path: str) -> Rows:
        made = []
        for context, endings, label in _choices(path):
            tokens = tokenizer([context] * len(endings), endings, truncation=True, max_length=data.max_seq_length)
            made.append({**tokens, "labels": label})
        return made

    def scores(said: Any) -> Scores:
        return {"accuracy": float((said.predictions.argmax(axis=1) == said.label_ids).mean())}

    collator = transformers.DataCollatorForMultipleChoice(tokenizer)
    return Parts(rows(data.train_file), rows(data.validation_file), collator, scores)


def _columns(path: str, *names: str) -> list[tuple[str, ...]]:
    """Columns of a TSV file, by their names in its header or, of a file without one, by their numbers."""
    rows = [line.split("\t") for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    if all(name.isdigit() for name in names):
        places = [int(name) for name in names]
    else:
        header, *rows = rows
        places = [header.index(name) for name in names]
    return [tuple(row[place] for place in places) for row in rows]


def _sentences(path: str, label_column: int) -> list[tuple[list[str], list[str]]]:
    """(words, tags) of the sentences of a CoNLL file."""
    blocks = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    return [([row[0] for row in block], [row[label_column] for row in block]) for block in rows]


def _questions(path: str) -> list[_Question]:
    """The questions of a file as SQuAD 1.1 has it."""
    articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
    return [
        _Question(
            asked["question"],
            paragraph["context"],
            tuple(answer["text"] for answer in asked["answers"]),
            asked["answers"][0]["answer_start"],
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def _choices(path: str) -> list[tuple[str, list[str], int]]:
    """(first sentence, four ways on from it, number of the right one) of a SWAG file, CSV or JSON lines."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file)) if path.endswith(".csv") else [json.loads(line) for line in file]
    return [
        (row["sent1"], [f"{row['sent2']} {row[f'ending{k}']}" for k in range(4)], int(row["label"])) for row in rows
    ]


def _rows(tokens: Any, **labels: Iterable[Any]) -> Rows:
    columns = {**tokens, **labels}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


_PARTS: dict[str, Callable[[Any, Any, Any], Parts]] = {
    "classify": _classify,
    "ner": _ner,
    "qa": _qa,
    "choice": _choice,
}
