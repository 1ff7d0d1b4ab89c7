"""Padding of encoded rows, and the data collators of transformers that ask for it."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bert_fast.tokenization import BertTokenizer

transformers = pytest.importorskip("transformers")

TEXTS = ["hello world", "a", "one two three four five", ""]


def rows(tokenizer: Any, **options: Any) -> list[dict[str, Any]]:
    """Encoded texts as a data set holds them."""
    return [{**tokenizer(text, **options), "label": index} for index, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "longest", "pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 12},
        {"padding": False},
        {"padding_side": "left"},
        {"return_tensors": "pt"},
        {"return_tensors": "np", "pad_to_multiple_of": 4},
        {"return_attention_mask": False},
    ],
    ids=str,
)
def test_pad(options: dict[str, Any], ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    for encoding in ({}, {"return_special_tokens_mask": True}, {"return_attention_mask": False}):
        if options.get("return_attention_mask") is False and encoding != {"return_attention_mask": False}:
            continue  # transformers leaves a mask that is there as it is, shorter than the padded row
        features = rows(ours(), **encoding)
        forms = [features, {key: [row[key] for row in features] for key in features[0]}, ours()(TEXTS, **encoding)]
        if options.get("return_tensors") is None:
            forms += [features[0], {"input_ids": [101, 5, 102]}]
        for form in forms:
            if isinstance(form, dict) and not isinstance(form["input_ids"][0], list):
                form = {key: value for key, value in form.items() if key != "label"}
            given = copy.deepcopy(form)
            mine, other = ours().pad(form, **options), theirs().pad(given, **options)
            assert set(mine) == set(other)
            for key in other:
                assert type(mine[key]) is type(other[key])
                actual, expected = (v.tolist() if hasattr(v, "tolist") else v for v in (mine[key], other[key]))
                assert actual == expected


def test_pad_keeps_the_kind_of_its_input(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    for kind, make in ((torch.Tensor, torch.tensor), (np.ndarray, np.array), (list, list)):
        padded = tokenizer.pad([{"input_ids": make([1, 2])}, {"input_ids": make([3])}])
        assert type(padded["input_ids"]) is kind
        assert torch.as_tensor(padded["input_ids"]).tolist() == [[1, 2], [3, 0]]
        assert torch.as_tensor(padded["attention_mask"]).tolist() == [[1, 1], [1, 0]]


def test_data_collator_with_padding(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    batches = [
        transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)(rows(tokenizer))
        for tokenizer in (ours(), theirs())
    ]
    assert set(batches[0]) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[1])


def test_data_collator_for_language_modeling(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    batches = []
    for tokenizer in (ours(), theirs()):
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
        torch.manual_seed(1)
        batches.append(collate([tokenizer(text) for text in TEXTS]))
    assert (batches[0]["labels"] >= 0).any()
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[1])


def test_data_collator_for_token_classification(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    batches = []
    for tokenizer in (ours(), theirs()):
        features = [{**tokenizer(text), "labels": [1] * len(tokenizer(text)["input_ids"])} for text in TEXTS]
        batches.append(transformers.DataCollatorForTokenClassification(tokenizer)(features))
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[1])


class Collate:
    """A collate function that travels to worker processes with its tokenizer."""

    def __init__(self, tokenizer: BertTokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: list[str]) -> Any:
        return self.tokenizer(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes(context: str, use_engine: str, ours: Callable[..., BertTokenizer]) -> None:
    if (context, use_engine) == ("spawn", "reference"):
        pytest.skip("a fresh process chooses its engine itself")
    tokenizer = ours()
    tokenizer(TEXTS * 50)  # whatever threads the engine has are there before the fork
    loader = DataLoader(
        TEXTS * 4, batch_size=4, num_workers=2, collate_fn=Collate(tokenizer), multiprocessing_context=context
    )
    batches = list(loader)
    assert len(batches) == 4
    for batch in batches:
        assert torch.equal(batch["input_ids"], tokenizer(TEXTS, padding=True, return_tensors="pt")["input_ids"])
        assert batch.word_ids(0) == tokenizer(TEXTS, padding=True).word_ids(0)


def test_pickles_and_copies_are_independent(ours: Callable[..., BertTokenizer]) -> None:
    original = ours()
    for make in (copy.copy, copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))):
        duplicate = make(original)
        assert dict(duplicate(TEXTS)) == dict(original(TEXTS))
        duplicate.add_tokens("zzznew")
        duplicate.padding_side = "left"
        assert (len(duplicate), len(original)) == (30523, 30522)
        assert original.padding_side == "right"
        assert "zzznew" in duplicate.tokenize("a zzznew")
        assert "zzznew" not in original.tokenize("a zzznew")


def test_threads(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    texts = [f"text number {index} of many, unaffable" for index in range(50)]
    expected = dict(tokenizer(texts))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(dict(tokenizer(texts)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 6
