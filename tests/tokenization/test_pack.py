"""Batches without padding."""

import pickle
from collections.abc import Callable

import torch

from bert_fast.tokenization import BertTokenizer, PackedBatch

TEXTS = ["hello world", "", "a b c d e", "x"]


def unpadded(
    tokenizer: BertTokenizer, texts: list[str], pairs: list[str] | None = None, **options: object
) -> list[list[int]]:
    """The same rows from an ordinary call."""
    return tokenizer(texts, pairs, **options)["input_ids"]


def test_it_is_the_padded_batch_without_padding(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    for pairs in (None, ["one", "two three", "", "four"]):
        batch = tokenizer.pack(TEXTS, pairs)
        padded = tokenizer(TEXTS, pairs, padding=True, return_tensors="pt")
        keep = padded["attention_mask"].bool()
        assert torch.equal(batch["input_ids"], padded["input_ids"][keep])
        assert torch.equal(batch["token_type_ids"], padded["token_type_ids"][keep])
        positions = torch.arange(keep.shape[1]).expand_as(keep)
        assert torch.equal(batch["position_ids"], positions[keep])
        lengths = keep.sum(dim=1)
        assert batch["cu_seqlens"].tolist() == [0, *lengths.cumsum(0).tolist()]
        assert batch["max_seqlen"] == int(lengths.max())
        assert isinstance(batch["max_seqlen"], int)
        assert batch.num_sequences == len(TEXTS)


def test_dtypes_and_keys(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack(TEXTS)
    assert list(batch) == ["input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen"]
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "token_type_ids", "position_ids"))
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.to("meta").input_ids.is_meta
    assert isinstance(pickle.loads(pickle.dumps(ours().pack(TEXTS))), PackedBatch)


def test_as_many_whole_texts_as_fit(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    lengths = [4, 2, 7, 3]
    for max_tokens in range(7, 20):
        start, seen = 0, []
        while start < len(TEXTS):
            batch = tokenizer.pack(TEXTS[start:], max_tokens=max_tokens)
            assert batch.num_sequences >= 1
            assert len(batch["input_ids"]) <= max_tokens
            taken = start + batch.num_sequences
            # The next one would not have fitted.
            assert taken == len(TEXTS) or sum(lengths[start : taken + 1]) > max_tokens
            seen += batch["input_ids"].tolist()
            start = taken
        assert seen == [token for row in unpadded(tokenizer, TEXTS) for token in row]


def test_long_lists_are_read_only_as_far_as_needed(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    texts = ["a"] * 5000
    batch = tokenizer.pack(texts, max_tokens=3 * 1500 + 2)
    assert batch.num_sequences == 1500
    assert tokenizer.pack(texts, max_tokens=10**6).num_sequences == 5000
    pairs = tokenizer.pack(texts, texts, max_tokens=5 * 700)
    assert pairs.num_sequences == 700


def test_truncation(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    assert tokenizer.pack(TEXTS, max_length=4)["cu_seqlens"].tolist() == [0, 4, 6, 10, 13]
    assert tokenizer.pack(TEXTS, max_length=4, max_tokens=6).num_sequences == 2
    limited = ours(model_max_length=5)  # positions beyond it do not exist
    assert limited.pack(TEXTS)["max_seqlen"] == 5
    expected = unpadded(tokenizer, TEXTS, TEXTS, truncation=True, max_length=6)
    packed = tokenizer.pack(TEXTS, TEXTS, max_length=6)["input_ids"].tolist()
    assert packed == [token for row in expected for token in row]


def test_nothing_to_pack(ours: Callable[..., BertTokenizer]) -> None:
    batch = ours().pack([])
    assert batch["cu_seqlens"].tolist() == [0]
    assert (batch["max_seqlen"], batch.num_sequences) == (0, 0)
    assert ours().pack([], max_tokens=5).num_sequences == 0


def test_lists_of_pairs(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    expected = tokenizer.pack(["a", "b"], ["c", "d"])
    actual = tokenizer.pack([("a", "c"), ("b", "d")])
    assert torch.equal(actual["input_ids"], expected["input_ids"])
