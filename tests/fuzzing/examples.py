"""Surfaces: files and rows of examples, collators, packing, plans of batches, and stores of tokens."""

import bz2
import functools
import gzip
import io
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bert_fast import ops
from bert_fast.data import (
    Batches,
    ClassificationSource,
    MultipleChoiceSource,
    PackedCollator,
    PretrainingSource,
    QuestionAnsweringSource,
    TokenClassificationSource,
    TokenStore,
    tokenize_files,
)
from bert_fast.data.conll import read_conll
from bert_fast.data.questions import read_questions
from bert_fast.data.sequences import Sequences
from bert_fast.data.tables import read_table
from bert_fast.ops import Packing

from ..data.corpora import make_store, make_tokenizer, random_documents
from .case import Case
from .damage import Files, damage, mutated_json, read_folder, write_folder
from .tensors import Tensors, garbage, spoil
from .texts import Texts

__all__ = ["run_collators", "run_sources", "run_stores", "run_tables"]

_TOKENIZER = make_tokenizer()
# What messages about files and rows call their places.
_PLACES = ("source", "data", "rows", "row", "column", "question", "answers", "context", "labels", "label", "texts")


# --- tables, questions, sentences -------------------------------------------------------------------------------------


def _text(rng: random.Random) -> str:
    return " ".join(
        rng.choices(
            ["w1", "w2p3", "unknown", "a\tb", '"', "é", "", "w5,", "\ud800" if rng.random() < 0.01 else "."], k=4
        )
    )


def _records(rng: random.Random, kind: str) -> list[dict[str, Any]]:
    count = rng.randint(1, 5)
    match kind:
        case "class":
            return [{"text": _text(rng), "other": _text(rng), "label": rng.choice(("a", "b"))} for _ in range(count)]
        case "number":
            return [{"text": _text(rng), "label": rng.choice((0.5, 1, 2.5))} for _ in range(count)]
        case "choice":
            return [
                {"question": _text(rng), "choices": {"text": ["w1", "w2"], "label": ["A", "B"]}, "answerKey": "A"}
                if rng.random() < 0.5
                else {"sent1": "w1", "sent2": "w2", "ending0": "w3", "ending1": "w4", "label": rng.randrange(2)}
                for _ in range(count)
            ]
        case "question":
            return [
                {"id": str(i), "question": "w1 w2 ?", "context": "w3 w4 w5 w6",
                 "answers": {"text": ["w4"], "answer_start": [3]}}
                for i in range(count)
            ]  # fmt: skip
        case _:
            return [{"tokens": ["w1", "w2"], "ner_tags": ["O", "B-PER"]} for _ in range(count)]


def _squad(rng: random.Random) -> bytes:
    answers = [{"text": "w4", "answer_start": 3}]
    questions = [{"id": f"q{i}", "question": "w1 ?", "answers": answers, "is_impossible": False} for i in range(2)]
    return json.dumps(
        {"version": "2.0", "data": [{"paragraphs": [{"context": "w3 w4 w5", "qas": questions}]}]}
    ).encode()


def _conll(rng: random.Random) -> bytes:
    lines = []
    for _ in range(rng.randint(1, 8)):
        lines.append(rng.choice(("w1 O", "w2 B-PER", "w3 I-PER", "", "# comment", "-DOCSTART- O", "w1\tO", "w5")))
    return rng.choice(("\n", "\n", "\r\n")).join([*lines, "w1 O", ""]).encode()


def _file(case: Case, records: list[dict[str, Any]]) -> Path:
    """The records as a file of one of the formats."""
    rng = case.rng
    ending = rng.choice((".tsv", ".csv", ".jsonl", ".jsonl", ".parquet", ".txt", ".json"))
    path = case.folder / f"data{ending}"
    if ending in (".tsv", ".csv", ".txt"):
        between = "," if ending == ".csv" else "\t"
        names = list(records[0])
        rows = [names, *([str(record.get(name, "")) for name in names] for record in records)]
        content = "\n".join(between.join(row) for row in rows).encode(errors="surrogatepass")
    elif ending == ".parquet":
        file = io.BytesIO()
        try:
            pq.write_table(pa.Table.from_pylist(records), file)
        except (pa.ArrowException, UnicodeError):
            file = io.BytesIO()
        content = file.getvalue()
    else:
        content = "\n".join(map(json.dumps, records)).encode()
    path.write_bytes(content + rng.choice((b"", b"\n")))
    return path


def _disturbed(case: Case, records: list[dict[str, Any]]) -> Any:
    """Records with other fields."""
    for _ in range(case.rng.choice((0, 1, 1, 2))):
        records = mutated_json(case.rng, records)
    return records


_READERS: dict[str, Any] = {
    "class": ClassificationSource,
    "number": ClassificationSource,
    "choice": MultipleChoiceSource,
    "question": QuestionAnsweringSource,
    "squad": QuestionAnsweringSource,
    "token": TokenClassificationSource,
    "conll": TokenClassificationSource,
}


def run_tables(case: Case) -> None:
    """Sources of examples out of files and rows, whole and damaged."""
    rng = case.rng
    kind = rng.choice(("class", "class", "number", "choice", "question", "squad", "token", "conll"))
    data: Any
    if kind in ("squad", "conll"):
        data = case.folder / ("data.json" if kind == "squad" else "data.conll")
        data.write_bytes(_squad(rng) if kind == "squad" else _conll(rng))
    else:
        records = _records(rng, kind)
        if case.chance(0.4):
            data = _disturbed(case, records)
        elif case.chance(0.1):
            try:
                data = datasets.Dataset.from_list(records)
            except Exception:  # pyarrow's own refusals of what was drawn
                data = records
        else:
            data = _file(case, records)
    if isinstance(data, Path):
        damage(case, case.folder, rng.choice((0, 0, 1, 1, 2)))
        case.say(f"# {data.name}: {data.read_bytes()[:300] if data.is_file() and not data.is_symlink() else None!r}")
    options = _reading_options(case, kind)
    names = (*_PLACES, *options, *([data] if isinstance(data, str) and data else []))
    if case.chance(0.15):
        readers: tuple[Callable[..., Any], ...] = (read_table, read_questions, read_conll)
        case.call(rng.choice(readers), data, names=names)
        return
    source = case.call(_READERS[kind].read, data, _TOKENIZER, **options, names=names)
    lengths = case.call(source.lengths, 0)
    batch = case.call(source.batch, 0, np.arange(len(lengths)))
    case.expect(
        int(batch["cu_seqlens"][-1]) == len(batch["input_ids"]), "cu_seqlens do not end at the number of tokens"
    )
    case.expect(int(lengths.sum()) == len(batch["input_ids"]), "a batch has another length than was planned")


def _reading_options(case: Case, kind: str) -> dict[str, Any]:
    rng = case.rng
    options: dict[str, Callable[[], Any]] = {"max_length": lambda: rng.choice((4, 5, 8, 16, 128))}
    if kind in ("class", "number"):
        options |= {
            "text": lambda: rng.choice(("text", "other", "0", "nothing")),
            "text_pair": lambda: rng.choice(("other", "text", None)),
            "label": lambda: rng.choice(("label", None, "2")),
            "labels": lambda: rng.choice((["a", "b"], ["a"], ["a", "a"], None)),
            "regression": lambda: kind == "number",
        }
    elif kind in ("question", "squad"):
        options |= {"stride": lambda: rng.choice((0, 1, 3, 500)), "skip_wrong_answers": lambda: True}
    elif kind in ("token", "conll"):
        options |= {"labels": lambda: rng.choice((["O", "B-PER", "I-PER"], ["O"], None)), "truncate": lambda: True}
    chosen = {name: options[name]() for name in rng.sample(sorted(options), rng.randint(0, len(options)))}
    if kind == "number":
        chosen |= {"regression": True}
    if chosen and case.chance(0.15):
        name = rng.choice(sorted(chosen))
        chosen[name] = spoil(rng, chosen[name])
    if case.chance(0.15):
        chosen["cache_dir"] = case.folder / "cache"
        if kind in ("token", "conll"):
            del chosen["cache_dir"]
    return chosen


# --- text files and stores of tokens ----------------------------------------------------------------------------------


def run_sources(case: Case) -> None:
    """`tokenize_files` on files of all formats, whole and damaged."""
    rng, texts = case.rng, Texts(case)
    files: list[Any] = []
    for index in range(rng.randint(1, 3)):
        lines = [texts.text().replace("\n", " ").encode(errors="replace") for _ in range(rng.randint(0, 4))]
        ending = rng.choice((".txt", ".txt", ".jsonl", ".txt.gz", ".txt.bz2", ".jsonl.gz", ".parquet"))
        content = b"\n".join(lines)
        if ".jsonl" in ending:
            records = [
                mutated_json(rng, {"text": line.decode()}) if case.chance(0.1) else {"text": line.decode()}
                for line in lines
            ]
            content = "\n".join(map(json.dumps, records)).encode()
        if ending.endswith(".gz"):
            content = gzip.compress(content, mtime=0)
        elif ending.endswith(".bz2"):
            content = bz2.compress(content)
        elif ending == ".parquet":
            file = io.BytesIO()
            pq.write_table(pa.table({"text": pa.array([line.decode() for line in lines], pa.string())}), file)
            content = file.getvalue()
        path = case.folder / "in" / f"file{index}{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        files.append(rng.choice((path, str(path))))
    damage(case, case.folder / "in", rng.choice((0, 0, 1, 1, 2)))
    options: dict[str, Any] = {
        "format": rng.choice(("auto", "auto", "text", "lines", "jsonl", "parquet")),
        "field": rng.choice(("text", "other")),
        "errors": rng.choice(("strict", "replace", "ignore")),
        "num_threads": rng.choice((0, 1, 2)),
        "block_bytes": rng.choice((1, 7, 64, 1 << 20)),
        "checkpoint_seconds": rng.choice((0.0, 5.0)),
    }
    options = {name: options[name] for name in rng.sample(sorted(options), rng.randint(0, 4))}
    if options and case.chance(0.15):
        name = rng.choice(sorted(options))
        options[name] = spoil(rng, options[name])
        is_large = isinstance(options[name], int) and options[name] > 64
        if name in ("num_threads", "block_bytes") and is_large:  # as much memory or as many threads as asked for
            options[name] = 3
    if case.chance(0.05):
        files = spoil(rng, files)
    store = case.call(tokenize_files, files, case.folder / "store", _TOKENIZER, **options, names=_PLACES)
    case.expect(int(store.boundaries[-1]) == len(store.tokens), "boundaries do not end at the number of tokens")
    again = case.call(tokenize_files, files, case.folder / "store", _TOKENIZER, **options, names=_PLACES)
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
        store = case.call(tokenize_files, [source], path, _TOKENIZER, format=kind, names=_PLACES)
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
    options: dict[str, Any] = {
        "max_length": rng.choice((5, 8, 16, 128)),
        "next_sentence": case.chance(0.5),
        "whole_words": case.chance(0.5),
        "mask_probability": rng.choice((0.15, 1.0, 0.01)),
        "seed": rng.choice((0, 7, 2**63)),
        "short_sequence_probability": rng.choice((0.0, 0.1, 1.0)),
    }
    if case.chance(0.3):
        name = rng.choice(sorted(options))
        options[name] = spoil(rng, options[name])
    source = case.call(PretrainingSource, store, _TOKENIZER, **options)
    epoch = rng.choice((0, 1))
    lengths = case.call(source.lengths, epoch, any_error=not is_verified)
    indices = np.array([rng.randrange(len(lengths)) for _ in range(3)]) if len(lengths) else np.zeros(0, np.int64)
    batch = case.call(source.batch, epoch, indices, any_error=not is_verified)
    ids = batch["input_ids"]
    case.expect(
        not is_verified or not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < len(_TOKENIZER),
        "ids outside of the vocabulary",
    )


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
    """`PackedCollator`, `Packing`, `unpad`, `repad`, `Sequences` or `Batches`."""
    case.rng.choice((_collate, _collate, _pack, _pack, _repad, _sequences, _batches))(case)


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


def _sequences(case: Case) -> None:
    rng = case.rng
    lengths = [rng.randint(0, 4) for _ in range(rng.randint(0, 4))]
    arguments: dict[str, Any] = {
        "ids": np.zeros(sum(lengths), np.int32),
        "boundaries": np.cumsum([0, *lengths]).astype(np.int64),
        "token_type_ids": rng.choice((None, np.zeros(sum(lengths), np.uint8))),
    }
    if case.chance(0.6):
        name = rng.choice(sorted(arguments))
        arguments[name] = rng.choice((np.zeros(3, np.int64), np.array([0, 5, 2]), np.zeros((1, 1)), garbage(rng)))
    case.call(Sequences, **arguments)


def _batches(case: Case) -> None:
    rng = case.rng
    lengths: Any = np.array([rng.randint(0, 9) for _ in range(rng.randint(0, 30))], np.int32)
    arguments = {
        "batch_size": rng.choice((None, 1, 3, 100)),
        "max_tokens": rng.choice((None, 9, 16, 1000)),
        "shuffle": case.chance(0.7),
        "seed": rng.choice((0, 5, 2**64)),
    }
    if case.chance(0.3):
        name = rng.choice(sorted(arguments))
        arguments[name] = spoil(rng, arguments[name])
    batches = case.call(Batches, _Lengths(lengths), **arguments)
    plan = case.call(batches.plan, rng.choice((0, 1, 10**6)), names=("batch_size", "max_tokens", "seed", "shuffle"))
    found = sorted(index for number in range(len(plan)) for index in plan.indices(number).tolist())
    case.expect(found == list(range(len(lengths))), "an example is in no batch of an epoch, or in two")
