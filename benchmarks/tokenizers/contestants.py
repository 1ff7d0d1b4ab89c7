"""Tokenizers by one set of names: what each of them is called with for each form of output.

`load(name, vocabulary)` makes a fresh tokenizer and returns its forms, functions of a list of texts (of one text for
"one"); a form that a tokenizer does not offer is missing:
    arrays   (ids [N], boundaries [n + 1]), NumPy arrays
    int64_arrays   the same, with ids as wide as a model takes them
    padded   {"input_ids", "attention_mask", "token_type_ids"}, int64 [n, 512]; longer texts cut, shorter ones padded
    lists    a list of ints for each text
    one      a list of ints
    packed, entries   arrays as a model takes them: (input_ids, cu_seqlens) of a batch without padding, whose types and
             positions the model makes; and the same with these
    offsets, word_ids, origins   arrays, with (start, stop) of every token, its word's number, or both
Texts get [CLS] and [SEP], except from those who know of none (`HAS_NO_SPECIAL_TOKENS`).
"""

import functools
import importlib.util
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tokenizers.vocabularies import UnigramVocabulary, Vocabulary

Forms = dict[str, Callable[[Any], Any]]
MAX_LENGTH = 512
HAS_NO_SPECIAL_TOKENS = frozenset({"blingfire", "kitoken"})


def load(name: str, vocabulary: Vocabulary) -> Forms:
    """A fresh tokenizer. ImportError where it is not installed, ValueError where it cannot have the vocabulary."""
    return _LOADERS[name](vocabulary)


def missing(name: str) -> str | None:
    """Why a contestant cannot take part, or None."""
    if importlib.util.find_spec(module(name)) is not None:
        return None
    return f"the package {_PACKAGES.get(name, name)} is not installed"


def module(name: str) -> str:
    """What to import."""
    return "flash_tokenizer" if name == "flash" else name


def version(name: str) -> str:
    """Of the package."""
    return metadata.version(_PACKAGES.get(name, name))


def _bert_fast(vocabulary: Vocabulary) -> Forms:
    from bert_fast.tokenization import BertTokenizer, XLMRobertaTokenizer

    tokenizer: BertTokenizer | XLMRobertaTokenizer
    if isinstance(vocabulary, UnigramVocabulary):
        tokenizer = XLMRobertaTokenizer(json.loads(vocabulary.tokenizer_json().read_text(encoding="utf-8")))
    else:
        tokenizer = BertTokenizer(vocabulary.path, do_lower_case=vocabulary.lowercase, model_max_length=None)
    ragged = tokenizer.encode_ragged
    padding = dict(padding="max_length", truncation=True, max_length=MAX_LENGTH, return_tensors="np")

    def packed(texts: list[str]) -> Any:
        batch = tokenizer.pack(texts)
        return batch.input_ids, batch.cu_seqlens

    def entries(texts: list[str]) -> Any:
        batch = tokenizer.pack(texts)
        return batch.input_ids, batch.cu_seqlens, batch.token_type_ids, batch.position_ids

    return {
        "arrays": lambda texts: ragged(texts)[:2],
        "int64_arrays": lambda texts: ragged(texts, dtype="int64")[:2],
        "packed": packed,
        "entries": entries,
        "padded": lambda texts: tokenizer(texts, **padding),
        "lists": tokenizer.encode,
        "one": tokenizer.encode,
        "offsets": functools.partial(ragged, return_offsets_mapping=True),
        "word_ids": functools.partial(ragged, return_word_ids=True),
        "origins": functools.partial(ragged, return_offsets_mapping=True, return_word_ids=True),
        "one_thread": functools.partial(ragged, num_threads=1),
        "two_threads": functools.partial(ragged, num_threads=2),
    }


def _tokenizers(vocabulary: Vocabulary) -> Forms:
    import tokenizers

    path = str(vocabulary.tokenizer_json())
    plain, padding = tokenizers.Tokenizer.from_file(path), _padding(tokenizers.Tokenizer.from_file(path))

    def origins(texts: list[str]) -> Any:
        rows = plain.encode_batch(texts)
        words = [-1 if word is None else word for row in rows for word in row.word_ids]
        return *_joined([row.ids for row in rows]), np.array([o for row in rows for o in row.offsets]), np.array(words)

    return {
        "arrays": lambda texts: _joined([encoding.ids for encoding in plain.encode_batch_fast(texts)]),
        "padded": lambda texts: _matrices(padding.encode_batch_fast(texts)),
        "lists": lambda texts: [encoding.ids for encoding in plain.encode_batch_fast(texts)],
        "one": lambda text: plain.encode(text).ids,
        "origins": origins,
    }


def _nanotoken(vocabulary: Vocabulary) -> Forms:
    import nanotoken

    tokenizer = nanotoken.Tokenizer.from_json(vocabulary.tokenizer_json().read_text(encoding="utf-8"))
    padding = dict(max_length=MAX_LENGTH, padding="max_length", parallel=False)

    def arrays(texts: list[str], parallel: bool = False) -> Any:
        ragged = tokenizer.encode_batch(texts, parallel=parallel)
        return ragged.ids, ragged.offsets

    return {
        "arrays": arrays,
        "padded": lambda texts: tokenizer.encode_batch_padded(texts, **padding),
        "lists": lambda texts: tokenizer.encode_batch_list(texts, parallel=False),
        "one": lambda text: tokenizer.encode(text).tolist(),
        "two_threads": functools.partial(arrays, parallel=True),
    }


def _splintr(vocabulary: Vocabulary) -> Forms:
    import splintr

    tokenizer = splintr.from_json_bytes(vocabulary.tokenizer_json().read_bytes())

    def arrays(texts: list[str]) -> Any:
        ids, boundaries = tokenizer.encode_batch_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(boundaries, np.uint64)

    return {"arrays": arrays, "lists": tokenizer.encode_batch, "one": tokenizer.encode, "two_threads": arrays}


def _tokie(vocabulary: Vocabulary) -> Forms:
    import tokie

    path = str(vocabulary.tokenizer_json())
    tokenizer, padding = tokie.Tokenizer.from_json(path), _padding(tokie.Tokenizer.from_json(path))

    def arrays(texts: list[str]) -> Any:
        ids, lengths = tokenizer.encode_batch_flat(texts)
        return ids, _boundaries(lengths)

    return {
        "arrays": arrays,
        "padded": lambda texts: _matrices(padding.encode_batch(texts)),
        "lists": lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)],
        "one": lambda text: tokenizer.encode(text).ids,
        "two_threads": arrays,
    }


def _flash(vocabulary: Vocabulary) -> Forms:
    import flash_tokenizer

    # Its max_length is that of the longest word as well as that of a row, so rows that stay whole need a large one.
    large = flash_tokenizer.BertTokenizerFlash(str(vocabulary.path), vocabulary.lowercase, 1_000_000)
    core = large.tokenizer
    padding = dict(padding="max_length", max_length=MAX_LENGTH, return_tensors="np", do_multiprocess=False)

    def lists(texts: list[str]) -> Any:
        return core.batch_encode(texts, "longest", -1, False)

    return {
        "arrays": lambda texts: _joined(lists(texts)),
        "padded": lambda texts: large(texts, **padding),
        "lists": lists,
        "one": lambda text: core.encode(text, "longest", -1),
    }


def _blingfire(vocabulary: Vocabulary) -> Forms:
    import blingfire

    model = {
        "bert-base-uncased": "bert_base_tok.bin",
        "bert-base-cased": "bert_base_cased_tok.bin",
        "bert-base-chinese": "bert_chinese.bin",
        "bert-base-multilingual-cased": "bert_multi_cased.bin",
    }[vocabulary.name]
    handle = blingfire.load_model(str(Path(blingfire.__file__).with_name(model)))
    unknown = vocabulary.tokens().index("[UNK]")

    def one(text: str) -> Any:
        return blingfire.text_to_ids(handle, text, len(text) + 1, unknown, True)

    return {
        "arrays": lambda texts: _joined([one(text) for text in texts]),
        "lists": lambda texts: [one(text).tolist() for text in texts],
        "one": lambda text: one(text).tolist(),
    }


def _kitoken(vocabulary: Vocabulary) -> Forms:
    import kitoken

    tokenizer = kitoken.Kitoken.from_tokenizers(vocabulary.tokenizer_json().read_bytes())
    return {
        "arrays": lambda texts: _joined(tokenizer.encode_all(texts, True)),
        "lists": lambda texts: tokenizer.encode_all(texts, True),
        "one": lambda text: tokenizer.encode(text, True),
    }


def _padding(tokenizer: Any) -> Any:
    """A tokenizer of `tokenizers` or tokie that cuts and pads."""
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding(length=MAX_LENGTH)
    return tokenizer


def _matrices(rows: list[Any]) -> dict[str, np.ndarray]:
    names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {key: np.array([getattr(row, name) for row in rows], np.int64) for key, name in names.items()}


def _joined(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rows one after the other, and their boundaries."""
    return np.concatenate([np.asarray(row, np.uint32) for row in rows]), _boundaries([len(row) for row in rows])


def _boundaries(lengths: Any) -> np.ndarray:
    boundaries = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=boundaries[1:])
    return boundaries


_LOADERS: dict[str, Callable[[Vocabulary], Forms]] = {
    "bert_fast": _bert_fast,
    "nanotoken": _nanotoken,
    "splintr": _splintr,
    "tokie": _tokie,
    "flash": _flash,
    "blingfire": _blingfire,
    "kitoken": _kitoken,
    "tokenizers": _tokenizers,
}
CONTESTANTS = tuple(_LOADERS)
PEERS = CONTESTANTS[1:]
_PACKAGES = {"splintr": "splintr-rs", "flash": "flash-tokenizer"}
