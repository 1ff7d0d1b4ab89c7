"""Entries of a packed batch that are made when they are read: whoever reads them, in whatever way, finds them there."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from bert_fast import BertConfig, BertForMaskedLM, BertModel, BertTokenizer
from bert_fast.graphs import Budget, TokenBuffers
from bert_fast.tokenization import PackedBatch

TEXTS = ["hello world", "", "a b c d e", "x"]
LENGTHS = [4, 2, 7, 3]
KEYS = ["input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen"]
POSITIONS = [place for length in LENGTHS for place in range(length)]
TINY = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)

READERS: dict[str, Callable[[PackedBatch], dict[str, Any]]] = {
    "item": lambda batch: {key: batch[key] for key in batch},
    "attribute": lambda batch: {key: getattr(batch, key) for key in batch},
    "get": lambda batch: {key: batch.get(key) for key in batch},
    "items": lambda batch: {key: value for key, value in batch.items()},  # noqa: C416
    "values": lambda batch: {key: value for key, value in zip(batch, batch.values(), strict=True)},  # noqa: C416
    "dict": lambda batch: dict(batch),
    "call": lambda batch: (lambda **entries: entries)(**batch),
    "display": lambda batch: {**batch},
    "update": lambda batch: (made := {}, made.update(batch))[0],
    "union": lambda batch: batch | {},
    "right_union": lambda batch: {} | batch,
    "copy": lambda batch: batch.copy(),
    "copy_copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "pop": lambda batch: {key: batch.pop(key) for key in list(batch)},
    "popitem": lambda batch: dict(reversed([batch.popitem() for _ in range(len(batch))])),
    "setdefault": lambda batch: {key: batch.setdefault(key) for key in batch},
    "without_ids": lambda batch: {"input_ids": batch["input_ids"]} | (batch.__delitem__("input_ids") or dict(batch)),
    "loader": lambda batch: next(iter(DataLoader([batch], collate_fn=lambda found: dict(found[0])))),
    "moved": lambda batch: dict(batch.to("cpu")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_read_in_any_way(read: Callable[[PackedBatch], dict[str, Any]], ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(TEXTS)
    assert len(batch) == len(KEYS)
    assert "position_ids" in batch
    found = read(batch)
    assert list(found) == KEYS
    assert found["position_ids"].tolist() == POSITIONS
    assert found["token_type_ids"].tolist() == [0] * sum(LENGTHS)
    assert {found[key].dtype for key in KEYS[:3]} == {torch.int64}
    assert found["cu_seqlens"].tolist() == [0, 4, 6, 13, 16]


def test_they_are_made_once_and_may_be_written_to(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(TEXTS)
    batch["token_type_ids"][3] = 1
    batch.position_ids[0] = 9
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1] + [0] * 12
    assert dict(batch)["position_ids"].tolist() == [9, *POSITIONS[1:]]
    other = ours().pack(TEXTS)
    assert other.token_type_ids.sum() == 0


def test_what_is_put_in_their_place_stays(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(TEXTS)
    batch["position_ids"] = None
    batch |= {"token_type_ids": 5}
    assert (batch["position_ids"], batch.token_type_ids, dict(batch)["token_type_ids"]) == (None, 5, 5)
    with pytest.raises(KeyError):
        batch["labels"]
    assert batch.get("labels", 3) == 3
    assert batch.pop("labels", 4) == 4


def test_shown_and_compared_as_dictionaries_are(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(["a"])
    assert repr(batch) == repr(dict(ours().pack(["a"])))
    assert "Later" not in repr(batch)
    tensor = batch.input_ids
    assert PackedBatch(input_ids=tensor, n=1) == {"input_ids": tensor, "n": 1}
    assert PackedBatch(n=1) != {"n": 2}


def test_on_another_device(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(TEXTS).to("meta")
    for key in KEYS[:3]:
        assert batch[key].is_meta
        assert batch[key].shape == (16,)
        assert batch[key].dtype == torch.int64


def test_no_texts(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack([])
    assert (batch.position_ids.tolist(), batch.token_type_ids.tolist()) == ([], [])


@pytest.mark.parametrize("pairs", [None, ["one", "two three", "", "four"]], ids=["single", "pairs"])
def test_models_make_what_is_missing(pairs: list[str] | None, ours: Callable[..., BertTokenizer]) -> None:
    """With all entries, and with none that it makes itself: one result, dropout on."""
    torch.manual_seed(0)
    model = BertModel(TINY).train()
    batch = ours().pack(TEXTS, pairs)
    kept = ("input_ids", "cu_seqlens", "max_seqlen", *(() if pairs is None else ("token_type_ids",)))
    found = []
    for entries in ({key: batch[key] for key in kept}, batch):
        torch.manual_seed(1)
        found.append(model(**entries).last_hidden_state)
    assert torch.equal(*found)


def test_buffers_of_graphs(ours: Callable[..., BertTokenizer]) -> None:
    """They ask for entries by kind: the ones that are made late have a place for every token, too."""
    buffers = TokenBuffers(Budget(20, 5, 8), ours().pack(TEXTS), "cpu")
    buffers.fill(ours().pack(TEXTS[::-1]))
    assert list(buffers.batch) == KEYS
    assert buffers.batch["position_ids"][:16].tolist() == [place for length in LENGTHS[::-1] for place in range(length)]


def test_a_compiled_model(ours: Callable[..., BertTokenizer]) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(TINY).eval()
    batch = ours().pack(TEXTS)
    expected = model(**batch).logits  # with gradients: without, a layer that is not compiled has other products
    actual = torch.compile(model, backend="eager")(**ours().pack(TEXTS)).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
