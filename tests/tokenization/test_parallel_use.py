"""One tokenizer in several threads and processes, lists that other threads change, very many texts."""

import functools
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.tokenization import BertTokenizer

from .native_core import SMALL_VOCAB, make_native, needs_native, read_books


@needs_native
def test_threads_share_a_tokenizer(shared_data: Path) -> None:
    """Calls of every kind at once, on a tokenizer whose ints are not made yet."""
    texts = read_books(shared_data)[:300]
    path = shared_data / "vocab" / "bert-base-uncased" / "vocab.txt"

    def work(tokenizer: BertTokenizer, _: int) -> tuple[Any, ...]:
        ragged = tokenizer.encode_ragged(texts, num_threads=2)
        rows = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="np")["input_ids"]
        return [tokenizer.encode(text) for text in texts], tokenizer.encode(texts), ragged.ids.tolist(), rows.tolist()

    want = work(BertTokenizer(path), 0)
    assert want[0] == want[1]
    with ThreadPoolExecutor(4) as pool:
        assert all(got == want for got in pool.map(functools.partial(work, BertTokenizer(path)), range(8)))


@needs_native
def test_lists_that_other_threads_change() -> None:
    """A call sees the list as it was at one moment."""
    engine = make_native(SMALL_VOCAB)
    states: list[list[Any]] = [["ab" * 40] * 200, ["a b " * 10, b"x"] * 20, []]
    want = [engine.encode_lists(state) for state in states]
    shared = list(states[0])
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for state in states:
                shared[:] = state

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert engine.encode_lists(shared) in want
            ids, cu_seqlens, _, _ = engine.encode(shared, num_threads=2)
            assert [part.tolist() for part in np.split(ids, cu_seqlens[1:-1])][: len(cu_seqlens) - 1] in want
    finally:
        done.set()
        changing.join()


class Texts(torch.utils.data.Dataset[str]):
    """Short texts, tokenized by the workers."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


def collate(tokenizer: BertTokenizer, texts: list[str]) -> tuple[Any, ...]:
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    return rows["input_ids"], tokenizer.encode_ragged(texts, num_threads=2).ids, [tokenizer.encode(t) for t in texts]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader(method: str, ours: Callable[..., BertTokenizer], use_engine: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    if (method, use_engine) == ("spawn", "reference"):
        pytest.skip("a fresh process chooses its engine itself")
    tokenizer = ours()
    texts = [f"text {k} " * (k % 7) for k in range(64)]
    if use_engine == "native":
        tokenizer.encode_ragged(texts * 200, num_threads=2)  # starts the parent's threads
    function = functools.partial(collate, tokenizer)
    make = functools.partial(torch.utils.data.DataLoader, Texts(texts), batch_size=16, collate_fn=function)
    loaded = make(num_workers=2 if method == "fork" else 1, multiprocessing_context=method)
    for got, want in zip(loaded, make(), strict=True):
        assert torch.equal(got[0], want[0])
        assert np.array_equal(got[1], want[1])
        assert got[2] == want[2]


@needs_native
@pytest.mark.parametrize("text", ["", "a"])
def test_a_million_texts(text: str) -> None:
    engine = make_native(SMALL_VOCAB)
    count, length = 1_000_000, len(text)
    texts = [text] * count
    ids, cu_seqlens, offsets, word_ids = engine.encode(texts, offsets=True, word_ids=True, around=(1, 2), dtype="int64")
    assert np.array_equal(cu_seqlens, np.arange(count + 1) * (2 + length))
    assert (ids.reshape(count, -1) == ids[: 2 + length]).all() and (ids[0], ids[1 + length]) == (1, 2)
    assert (len(offsets), len(word_ids)) == (len(ids), len(ids))
    rows, types, mask = engine.encode_rows((b"", np.zeros(count + 1, dtype=np.int64)), (1, 2), 0)
    assert rows.shape == types.shape == mask.shape == (count, 2)
    lists = engine.encode_lists(texts, (1, 2))
    assert len(lists) == count and all(item == lists[0] for item in lists[:: count // 100])
    assert engine.encode(texts)[1][-1] == count * length
