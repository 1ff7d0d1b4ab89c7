"""Surfaces: files and rows of examples, collators, packing, plans of batches, and stores of tokens."""

import functools
import importlib
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bert_fast import ops
from bert_fast.data import Batches, Examples, PackedCollator, PretrainingSource, TokenStore, tokenize_files
from bert_fast.ops import Packing
from bert_fast.training.tasks import TASKS, task_named

from ..data.corpora import make_store, make_tokenizer, random_documents
from .case import Case
from .damage import Files, damage, mutated_json, read_folder, write_folder
from .tensors import Tensors, garbage, spoil
from .texts import Texts

_TOKENIZER = make_tokenizer()
for _module in ("sklearn.metrics", "scipy.stats", "seqeval.metrics", "torchmetrics.functional.text"):
    importlib.import_module(_module)  # once, before workers are forked


def _drawn(case: Case, options: dict[str, tuple[Any, ...]], spoiled: float) -> dict[str, Any]:
    """Some of the options, one of them spoiled with this probability."""
    names = case.rng.sample(sorted(options), case.rng.randint(0, len(options)))
    chosen = {name: case.rng.choice(options[name]) for name in names}
    if chosen and case.chance(spoiled):
        name = case.rng.choice(sorted(chosen))
        chosen[name] = spoil(case.rng, chosen[name])
    return chosen


# --- examples of the four tasks ---------------------------------------------------------------------------------------

_WORDS = ("w1", "w2p3", "unknown", "a\tb", '"', "é", "", "w5,", "\x07")
# What a task's arguments may be, beside what spoils them.
_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "classify": {"text_column_name": ("text", "other", "0", "no"), "text_pair_column_name": ("other", "text", None),
                 "label_column_name": ("label", "number", "2"), "do_regression": (True,), "max_seq_length": (5, 128)},
    "ner": {"text_column_name": ("tokens", "ner_tags"), "word_column": (0, -1, 5), "label_column": (-1, 1),
            "max_seq_length": (3, 4, 16)},
    "qa": {"max_seq_length": (8, 12, 128), "doc_stride": (0, 3, 500), "n_best_size": (1, 20),
           "max_answer_length": (1, 30), "version_2_with_negative": (True,), "null_score_diff_threshold": (-5.0, 0.5)},
    "choice": {"label_column_name": ("label", "ending0"), "max_seq_length": (5, 16)},
}  # fmt: skip


def example_rows(rng: random.Random, task: str, words: tuple[str, ...] = _WORDS) -> list[dict[str, Any]]:
    """Rows that a task can learn from."""
    rows: list[dict[str, Any]] = []
    for number in range(rng.randint(2, 5)):
        text, other = (" ".join(rng.choices(words, k=4)) for _ in range(2))
        answers = {"text": ["w4"], "answer_start": [3]}
        rows.append({
            "classify": {"text": text, "other": other, "label": "ab"[number % 2], "number": rng.choice((0.5, 1))},
            "ner": {"tokens": [*rng.choices(words, k=3), "w2"], "ner_tags": ["O", "O", "O", "B-PER"]},
            "qa": {"id": str(number), "question": text, "context": "w3 w4 w5 w6", "answers": answers},
            "choice": {"sent1": text, "sent2": other, "ending0": "w3", "ending1": "w4", "label": number % 2},
        }[task])  # fmt: skip
    return rows


def file_content(ending: str, rows: list[dict[str, Any]]) -> bytes:
    """What a file of this ending holds of rows."""
    if ending == ".conll":
        sentences = [zip(row["tokens"], row["ner_tags"], strict=True) for row in rows]
        return "\n\n".join("\n".join(map("\t".join, sentence)) for sentence in sentences).encode()
    if ending == ".squad.json":
        qas = [{**row, "answers": [{"text": "w4", "answer_start": 3}], "is_impossible": False} for row in rows]
        return json.dumps({"version": "2.0", "data": [{"paragraphs": [{"context": "w3 w4", "qas": qas}]}]}).encode()
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file := io.BytesIO())
        return file.getvalue()
    if ending == ".jsonl":
        return "\n".join(map(json.dumps, rows)).encode()
    between = "," if ending == ".csv" else "\t"
    return "\n".join(between.join(map(str, row)) for row in [list(rows[0]), *(row.values() for row in rows)]).encode()


def run_examples(case: Case) -> None:
    """Examples of a task out of rows and files, whole and damaged; its metrics and rows of any predictions."""
    rng = case.rng
    name = rng.choice(list(TASKS))
    rows = example_rows(rng, name)
    data: Any = rows
    own = {"ner": [".conll"] * 3, "qa": [".squad.json"] * 3}
    if case.chance(0.6):
        ending = rng.choice([".tsv", ".csv", ".jsonl", ".jsonl", ".parquet", *own.get(name, ())])
        path = case.folder / f"data{ending}"
        path.write_bytes(file_content(ending, rows))
        damage(case, case.folder, rng.choice((0, 0, 1, 1, 2)))
        case.say(f"# {path.read_bytes()[:300] if path.is_file() and not path.is_symlink() else None!r}")
        data = rng.choice((path, str(path)))
    elif case.chance(0.2):
        data = datasets.Dataset.from_list(rows)
    else:
        for _ in range(rng.choice((0, 1, 1, 2))):
            data = mutated_json(rng, data)
    given = [data] if isinstance(data, str) and data else []
    options = _OPTIONS[name]
    kind = task_named(name)
    arguments = case.call(kind.Arguments, **_drawn(case, options, 0.15), names=options)
    is_labelled = case.chance(0.8)
    task = case.call(
        kind, arguments, _TOKENIZER, rng.choice((None, ["a", "b"], ["O", "B-PER"])) if is_labelled else ["a", "b"]
    )
    examples = case.call(task.read, data, is_labelled, names=(*options, "columns", *given))
    lengths = examples.lengths(0)
    batch = examples.batch(0, np.arange(len(lengths)))
    case.expect(int(batch["cu_seqlens"][-1]) == len(batch["input_ids"]), "cu_seqlens do not end at the last token")
    case.expect(int(lengths.sum()) == len(batch["input_ids"]), "a batch has another length than was planned")
    predictions = _predictions(case, name, task, examples)
    said = case.call(lambda: list(task.rows(examples, predictions)))
    case.expect(len(said) == len(examples.rows), "not one answer to each row")
    json.dumps(said)
    if is_labelled:
        metrics = case.call(task.metrics, examples, predictions, next(iter(examples.labels.values())))
        case.expect(all(np.isfinite(list(metrics.values()))), f"metrics that are no numbers: {metrics}")


def _predictions(case: Case, name: str, task: Any, examples: Examples) -> Any:
    """What a model may have said."""
    draw, tokens = np.random.default_rng(case.number), len(examples.sequences.ids)
    if name == "qa":
        scores = draw.normal(size=(2, tokens)).astype(np.float32)
        scores[draw.random(scores.shape) < 0.1] = case.rng.choice((0.0, np.nan, np.inf, -np.inf, 3e38))
        return tuple(scores)
    count = examples.num_choices
    if name != "choice":
        count = task.config().get("num_labels") or len(task.labels)
    return draw.normal(size=(tokens if name == "ner" else len(examples), count)).astype(np.float32)


# --- text files and stores of tokens ----------------------------------------------------------------------------------


_READING: dict[str, tuple[Any, ...]] = {
    "format": ("auto", "auto", "text", "lines", "jsonl", "parquet"), "field": ("text", "other"),
    "errors": ("strict", "replace"), "num_threads": (0, 1, 2), "block_bytes": (7, 16, 64, 1 << 20),
    "checkpoint_seconds": (0.0, 5.0),
}  # fmt: skip
_PRETRAINING: dict[str, tuple[Any, ...]] = {
    "max_length": (5, 8, 16, 128), "next_sentence": (True, False), "whole_words": (True, False), "seed": (0, 7, 2**63),
    "mask_probability": (0.15, 1.0, 0.01), "short_sequence_probability": (0.0, 0.1, 1.0),
}  # fmt: skip


def run_sources(case: Case) -> None:
    """`tokenize_files` on files of all formats, whole and damaged."""
    rng, texts = case.rng, Texts(case)
    files: list[Any] = []
    (case.folder / "in").mkdir()
    for index in range(rng.randint(1, 3)):
        lines = [texts.text().replace("\n", " ").encode(errors="replace").decode() for _ in range(rng.randint(0, 4))]
        ending = rng.choice((".txt", ".txt", ".jsonl", ".parquet"))
        path = case.folder / "in" / f"file{index}{ending}"
        content = "\n".join(lines).encode()
        path.write_bytes(content if ending == ".txt" else file_content(ending, [{"text": line} for line in lines]))
        files.append(rng.choice((path, str(path))))
    damage(case, case.folder / "in", rng.choice((0, 0, 1, 1, 2)))
    options = _drawn(case, _READING, 0.15)
    for name in ("num_threads", "block_bytes"):  # as much memory or as many threads as asked for
        if isinstance(options.get(name), int) and options[name] > 64:
            options[name] = 3
    if case.chance(0.05):
        files = spoil(rng, files)
    store = case.call(tokenize_files, files, case.folder / "store", _TOKENIZER, **options)
    case.expect(int(store.boundaries[-1]) == len(store.tokens), "boundaries do not end at the number of tokens")
    again = case.call(tokenize_files, files, case.folder / "store", _TOKENIZER, **options)
    case.expect(np.array_equal(store.tokens, again.tokens), "opened again, the store holds other tokens")


@functools.lru_cache(4)
def _store(number: int) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder), random_documents(number, 4, 4, 9), with_sentences=number % 2 == 0)
        return read_folder(Path(folder))


def run_stores(case: Case) -> None:
    """A store with damage, verified or not: it is refused, or it is read and trained from, whatever it holds now."""
    rng, number = case.rng, case.rng.randrange(4)
    write_folder(case.folder, _store(number))
    path = case.folder / "store"
    expected = case.call(TokenStore.open, path)
    tokens, boundaries = np.array(expected.tokens), np.array(expected.boundaries)
    del expected
    changed = damage(case, path, rng.choice((0, 1, 1, 1, 2, 3)))
    if case.chance(0.2):
        source = case.folder / "corpus.txt"
        kind = "auto" if number % 2 == 0 else "lines"
        store = case.call(tokenize_files, [source], path, _TOKENIZER, format=kind)
    else:
        store = case.call(TokenStore.open, path, rng.choice((None, _TOKENIZER)))
    for index in rng.choices((0, 1, -1, len(store), 10**9, -(10**9)), k=2):
        try:
            case.expect(store[index].dtype == store.tokens.dtype, "a document of another dtype")
        except IndexError:
            case.expect(not -len(store) <= index < len(store), f"document {index} of {len(store)} is not there")
    # Opening reads no tokens. What trains verifies first; without that, ids may be any numbers, and errors any errors.
    is_verified = case.chance(0.5) and case.call(store.verify)
    if is_verified:
        same = np.array_equal(store.tokens, tokens) and np.array_equal(store.boundaries, boundaries)
        case.expect(same, f"damage of {changed} went unnoticed: the store holds other tokens")
    source = case.call(PretrainingSource, store, _TOKENIZER, **_drawn(case, _PRETRAINING, 0.3))
    epoch = rng.choice((0, 1))
    lengths = case.call(source.lengths, epoch, any_error=not is_verified)
    indices = np.array([rng.randrange(len(lengths)) for _ in range(3)]) if len(lengths) else np.zeros(0, np.int64)
    batch = case.call(source.batch, epoch, indices, any_error=not is_verified)
    fits = all(0 <= number < len(_TOKENIZER) for number in batch["input_ids"].tolist())
    case.expect(fits or not is_verified, "ids outside of the vocabulary")


# --- collators, packing, plans ----------------------------------------------------------------------------------------


class _Lengths:
    """A source of examples of these lengths."""

    def __init__(self, lengths: Any) -> None:
        self._lengths = lengths

    def lengths(self, epoch: int) -> Any:
        return self._lengths

    def batch(self, epoch: int, indices: np.ndarray) -> Any:
        return indices


def run_collators(case: Case) -> None:
    """`PackedCollator`, `Packing`, `unpad`, `repad` or `Batches`."""
    case.rng.choice((_collate, _collate, _pack, _pack, _repad, _batches))(case)


def _collate(case: Case) -> None:
    rng = case.rng
    features = []
    for _ in range(rng.randint(0, 4)):
        length = rng.randint(0, 5)
        feature: dict[str, Any] = {"input_ids": [rng.randrange(30) for _ in range(length)], "label": rng.randrange(3)}
        if case.chance(0.5):
            feature["attention_mask"] = [1] * length
        features.append(feature)
    if case.chance(0.5) and features:
        feature = rng.choice(features)
        name = rng.choice(sorted(feature))
        feature[name] = spoil(rng, feature[name])
    value: Any = features if case.chance(0.95) else garbage(rng)
    collator = rng.choice((None, None, None, lambda features: {"attention_mask": torch.ones(2, 2)}, garbage(rng)))
    make = case.call(PackedCollator, collator)
    batch = case.call(make, value, names=("features", "collator", *(features[0] if features else ())))
    if isinstance(batch.get("input_ids"), torch.Tensor):
        case.expect(int(batch["cu_seqlens"][-1]) == len(batch["input_ids"]), "cu_seqlens do not end at the tokens")


def _pack(case: Case) -> None:
    rng, d = case.rng, Tensors(case)
    cu_seqlens, longest, lengths = d.offsets()
    if case.chance(0.5):
        arguments = {"cu_seqlens": cu_seqlens, "max_seqlen": longest, "num_tokens": sum(lengths)}
        for name in rng.sample(sorted(arguments), rng.choice((0, 1, 1, 2))):
            arguments[name] = spoil(rng, arguments[name])
        if isinstance(arguments["num_tokens"], int) and arguments["num_tokens"] > 10**6:
            arguments["num_tokens"] = 9
        case.call(Packing.from_cu_seqlens, **arguments)
        return
    mask = d.integers(2, rng.randint(0, 3), rng.randint(0, 6))
    if case.chance(0.5):
        mask = spoil(rng, mask)
    packing = case.call(Packing.from_keep_mask, mask)
    if mask.is_meta:
        return
    case.expect(packing.num_tokens == int((mask != 0).sum()), "packing keeps another number of tokens")


def _repad(case: Case) -> None:
    rng, d = case.rng, Tensors(case)
    batch, length = rng.randint(0, 3), rng.randint(0, 6)
    x = d.normal(batch, length, *rng.choice(((), (3,), (2, 2))))
    mask = rng.choice((None, d.integers(2, batch, length), d.integers(2, batch, length).bool()))
    fits = case.chance(0.5)
    packed, packing = case.call(ops.unpad, x if fits else spoil(rng, x), mask if case.chance(0.8) else spoil(rng, mask))
    other = packed if case.chance(0.8) else spoil(rng, packed)
    padded = case.call(ops.repad, other, packing, padding_value=rng.choice((0, 0, -1, 1.5, garbage(rng))))
    case.expect(padded.shape[0] == packing.num_sequences, "repad gives another number of rows")


def _batches(case: Case) -> None:
    rng = case.rng
    lengths: Any = np.array([rng.randint(0, 9) for _ in range(rng.randint(0, 30))], np.int32)
    limits: dict[str, tuple[Any, ...]] = {"batch_size": (None, 1, 3, 100), "max_tokens": (None, 9, 16, 1000)}
    options = limits | {"shuffle": (True, True, False), "seed": (0, 5, 2**64)}
    batches = case.call(Batches, _Lengths(lengths), **_drawn(case, options, 0.3))
    plan = case.call(batches.plan, rng.choice((0, 1, 10**6)), names=options)
    found = sorted(index for number in range(len(plan)) for index in plan.indices(number).tolist())
    case.expect(found == list(range(len(lengths))), "an example is in no batch of an epoch, or in two")
