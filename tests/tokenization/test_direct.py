"""Calls that the engine answers in one step give what the arithmetic of rows gives; short calls; ragged batches."""

import copy
import functools
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import RaggedBatch
from bert_fast.reference.wordpiece import WordPiece
from bert_fast.tokenization import BatchEncoding, BertTokenizer

from .native_core import SMALL_VOCAB, make_native, needs_native
from .test_call import SENTENCES, random_call


def the_long_way(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """The result of a call, or its error, where the engine makes neither lists nor matrices."""
    with monkeypatch.context() as patch:
        for name in ("calls.direct_lists", "calls.direct_rows", "batch.direct_rows"):
            patch.setattr(f"bert_fast.tokenization.{name}", lambda *_: None)
        return outcome(call)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        result = call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    if not isinstance(result, BatchEncoding):
        return result
    rows = [(row.tokens, row.offsets, row.word_ids, row.attention_mask, row.type_ids) for row in result.encodings or ()]
    return {name: (type(value), getattr(value, "dtype", None), plain(value)) for name, value in result.items()}, rows


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [row.tolist() for row in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.filterwarnings("ignore:.*max_length")
def test_any_options_either_way(ours: Callable[..., BertTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    kinds = set()
    for _ in range(400):
        text, pair, options = random_call(rng)
        options.update(
            return_tensors=rng.choice([None, "np", "pt"]),
            return_overflowing_tokens=False,
            return_offsets_mapping=rng.random() < 0.1,
            return_special_tokens_mask=rng.random() < 0.1,
            return_length=False,
            return_token_type_ids=rng.choice([None, True, False]),
            return_attention_mask=rng.choice([None, None, False]),
            stride=rng.choice([0, 0, 0, 1]),
            max_length=rng.choice([None, 0, 1, 2, 3, 5, 8, 13, 24]),
            is_split_into_words=False,
        )
        if options["return_tensors"] and rng.random() < 0.7:
            options["padding"] = rng.choice([True, "max_length"])
        if isinstance(text, list) and text and isinstance(text[0], list):
            text, pair = [" ".join(words) for words in text], None if pair is None else [" ".join(p) for p in pair]
        call = functools.partial(ours(truncation_side=rng.choice(["right", "left"])), text, pair, **options)
        got, want = outcome(call), the_long_way(monkeypatch, call)
        assert got == want, (text, pair, options)
        kinds.add((type(got[0]), options["return_tensors"]))
    assert len(kinds) == 6  # results and errors, of every kind


@needs_native
def test_rows_like_the_reference() -> None:
    """Every option of the engine's matrices, the refusals too."""
    rng = random.Random(3)
    native, reference = make_native(SMALL_VOCAB), WordPiece(SMALL_VOCAB)
    refused = 0
    for _ in range(1500):
        num_rows = rng.randint(0, 4)
        has_pair = np.array([rng.random() < 0.6 for _ in range(num_rows)], dtype=bool)
        num_texts = num_rows + int(has_pair.sum())
        texts = [" ".join(rng.choices(("a", "b", "é", "x1", "zz"), k=rng.randint(0, 12))) for _ in range(num_texts)]
        options = {
            "has_pair": has_pair if has_pair.any() or rng.random() < 0.5 else None,
            "pad_type": rng.choice([0, 3]),
            "max_length": rng.choice([0, 3, 4, 5, 6, 7, 9, 12]),
            "truncation": rng.choice(["longest_first", "only_first", "only_second"]),
            "truncate_left": rng.random() < 0.4,
            "width": rng.choice([0, 0, 9, 12]),
            "multiple_of": rng.choice([0, 1, 4]),
            "pad_left": rng.random() < 0.3,
            "types": rng.random() < 0.8,
            "mask": rng.random() < 0.8,
            "num_threads": rng.choice([0, 1, 2]),
        }
        around = rng.choice([None, (101, 102)])
        got, want = (engine.encode_rows(texts, around, 7, **options) for engine in (native, reference))
        assert (got is None) == (want is None), (texts, options)
        refused += got is None
        for mine, other in zip(got or (), want or (), strict=True):
            if num_rows:
                assert np.array_equal(mine, other), (texts, options)
            assert (mine is None) == (other is None)
    assert 50 < refused < 1000


@needs_native
def test_packed_like_the_reference() -> None:
    """Every limit, on one thread and on several."""
    rng = random.Random(5)
    native, reference = make_native(SMALL_VOCAB), WordPiece(SMALL_VOCAB)
    cut = 0
    for _ in range(800):
        texts = [
            " ".join(rng.choices(("a", "b", "é", "x1", "zz"), k=rng.choice([0, 1, 5, 30])))
            for _ in range(rng.choice([0, 1, 2, 7, 60]))
        ]
        around, limit = rng.choice([None, (101, 102)]), rng.choice([None, 0, 1, 4, 20])
        most = rng.choice([None, 0, 1, 10, rng.randint(0, 700)])
        want_ids, want_ends, want_longest = reference.pack(texts, around, limit, most)
        for num_threads in (0, 1, 3):
            ids, ends, longest = native.pack(texts, around, limit, most, num_threads)
            assert (ids.dtype, ends.dtype, type(longest)) == (np.int64, np.int32, int)
            assert np.array_equal(ids, want_ids), (texts, around, limit, most)
            assert (ends.tolist(), longest) == (want_ends.tolist(), want_longest), (texts, around, limit, most)
        cut += 1 < len(want_ends) <= len(texts)
    assert 100 < cut < 700


@needs_native
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"has_pair": [True]}, TypeError, "has_pair: expected a contiguous NumPy array of bool or None, got list"),
        ({"has_pair": np.array([1])}, TypeError, "has_pair: expected a contiguous NumPy array of bool"),
        (
            {"has_pair": np.array([True, False])},
            ValueError,
            "has_pair: expected as many texts as rows and pairs, 3, got 2",
        ),
        (
            {"truncation": "first"},
            ValueError,
            "truncation: expected 'longest_first', 'only_first' or 'only_second', got",
        ),
        ({"width": -1}, ValueError, "width: expected an int from 0"),
        ({"pad_left": 1}, TypeError, "pad_left: expected bool, got int"),
        ({"max_length": 2.0}, TypeError, "max_length: expected int, got float"),
    ],
)
def test_bad_rows(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_native(SMALL_VOCAB).encode_rows(["a", "b"], (1, 2), 0, **options)


@needs_native
@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("encode_one", (), "encode_one: expected 1 to 3 arguments, got 0"),
        ("encode_one", ("a", None, None, 4), "encode_one: expected 1 to 3 arguments, got 4"),
        ("encode_one", (3,), "^text: expected str or bytes, got int"),
        ("encode_one", ("a", (1,)), "around: expected a tuple of two ints or None, got tuple"),
        ("encode_one", ("a", (1, "b")), "around: expected a tuple of two ints or None, got tuple"),
        ("encode_one", ("a", None, 1.5), "max_tokens: expected int, got float"),
        ("encode_lists", (["a", 3],), r"texts\[1\]: expected str or bytes, got int"),
        ("encode_lists", ("a",), "texts: expected a sequence of str or bytes, got str"),
        ("encode_lists", (["a"], [1, 2]), "around: expected a tuple of two ints or None, got list"),
        ("pack", (), "pack: expected 1 to 5 arguments, got 0"),
        ("pack", (["a", 3],), r"texts\[1\]: expected str or bytes, got int"),
        ("pack", (["a"], (1, 2), 1.5), "max_tokens: expected int, got float"),
        ("pack", (["a"], (1, 2), None, "b"), "max_batch_tokens: expected int, got str"),
    ],
)
def test_bad_short_calls(method: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(make_native(SMALL_VOCAB), method)(*arguments)


@needs_native
def test_engines_that_were_never_made() -> None:
    core = type(make_native(SMALL_VOCAB))
    with pytest.raises(TypeError, match=r"__init__\(\) was not called"):
        core.__new__(core).encode_one("a")
    with pytest.raises(TypeError, match="descriptor 'encode_one'"):
        core.encode_one("a", "b")
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (core,), {})


def test_one_text_is_a_batch_of_one(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    engine = tokenizer._engine
    texts: list[Any] = [*SENTENCES, "word é中 " * 400, "é中".encode() * 1000, b"a\xff", "a\ud800b", "\U0001f600" * 3]
    for text in texts:
        ids = engine.encode([text])[0]
        assert engine.encode_one(text) == engine.encode_lists([text])[0] == ids.tolist()
        assert engine.encode_one(text, (5, 10**9)) == [5, *ids.tolist(), 10**9]
        assert engine.encode_one(text, None, 2) == ids[:2].tolist()
        assert engine.encode_lists([text, "a"], (5, 6), 1)[0] == [5, *ids[:1].tolist(), 6]
        assert tokenizer.encode(text) == tokenizer(text)["input_ids"] == [101, *ids.tolist(), 102]
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist()
    assert tokenizer.encode(texts) == tokenizer(texts)["input_ids"] == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode([]) == []
    assert tokenizer.encode([("a", "b")]) == [[101, 1037, 102, 1038, 102]]


@needs_native
def test_lists_share_their_ints() -> None:
    engine = make_native(
        ["[UNK]", *(f"{k}a" for k in range(2000))], added_tokens=[("<>", 60_000_000, False, False, False, False)]
    )
    first, second = engine.encode_lists(["1999a <>", "1999a <>"])
    assert first == second == [2000, 60_000_000]
    assert first[0] is second[0] is engine.encode_one("1999a")[0]
    first[0] += 1  # a list is its owner's
    assert engine.encode_one("1999a") == [2000]


def test_changes_of_the_tokenizer_count_at_once(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = copy.deepcopy(ours())
    assert tokenizer.encode("covid") == [101, 2522, 17258, 102]
    tokenizer.add_tokens(["covid"])
    assert tokenizer.encode("covid") == tokenizer("covid")["input_ids"] == [101, 30522, 102]
    assert tokenizer.encode(["covid"]) == [[101, 30522, 102]]
    tokenizer.cls_token, tokenizer.sep_token_id = "[MASK]", 1037
    assert tokenizer.encode("covid") == tokenizer("covid")["input_ids"] == [103, 30522, 1037]
    assert tokenizer.encode_ragged(["covid"]).ids.tolist() == [103, 30522, 1037]
    tokenizer.add_special_tokens({"cls_token": "<s>"})
    for same in (tokenizer, copy.copy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert same.encode("covid") == same(["covid"])["input_ids"][0] == [30523, 30522, 1037]
        assert same(["covid"], padding=True, return_tensors="np")["input_ids"].tolist() == [[30523, 30522, 1037]]


def test_a_class_with_its_own_call(shared_data: Any) -> None:
    class Loud(BertTokenizer):
        def __call__(self, text: Any = None, *arguments: Any, **options: Any) -> Any:
            return super().__call__(f"{text} !", *arguments, **options)

    tokenizer = Loud(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    assert tokenizer.encode("a") == tokenizer("a")["input_ids"] == [101, 1037, 999, 102]


@pytest.mark.parametrize("call", ["__call__", "encode"])
@pytest.mark.parametrize("text", ["a b c", ["a", "a b c"]])
def test_rows_that_are_too_long_are_told_once(call: str, text: Any, ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = copy.deepcopy(ours(model_max_length=4))
    with pytest.warns(UserWarning, match="a row has 5 tokens, more than model_max_length=4") as caught:
        getattr(tokenizer, call)(text)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(tokenizer, call)(text)
        tokenizer.encode_ragged(["a b c"])


# --- ragged batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_length", [None, 0, 2, 3, 7, 1000])
@pytest.mark.parametrize("special", [True, False])
def test_ragged(side: str, max_length: int | None, special: bool, ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours(truncation_side=side)
    if special and max_length == 0:
        with pytest.raises(ValueError, match="max_length: 0 leaves no room for the 2 special tokens of a text"):
            tokenizer.encode_ragged(SENTENCES, max_length=0)
        return
    batch = tokenizer.encode_ragged(
        SENTENCES,
        add_special_tokens=special,
        max_length=max_length,
        return_offsets_mapping=True,
        return_word_ids=True,
    )
    assert isinstance(batch, RaggedBatch)
    cut = {"truncation": max_length is not None, "max_length": max_length}
    want = tokenizer(list(SENTENCES), add_special_tokens=special, return_offsets_mapping=True, **cut)
    assert len(batch.cu_seqlens) == len(SENTENCES) + 1
    for row, (start, stop) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        assert batch.ids[start:stop].tolist() == want["input_ids"][row]
        assert [tuple(span) for span in batch.offsets[start:stop].tolist()] == want["offset_mapping"][row]
        assert [None if word < 0 else word for word in batch.word_ids[start:stop].tolist()] == want.word_ids(row)


def test_forms_of_ragged_batches(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    for dtype in ("int32", "int64"):
        arrays = tokenizer.encode_ragged(SENTENCES, dtype=dtype, return_word_ids=True)
        tensors = tokenizer.encode_ragged(SENTENCES, dtype=dtype, return_word_ids=True, return_tensors="pt")
        assert (arrays.ids.dtype, arrays.cu_seqlens.dtype) == (np.dtype(dtype), np.int64)
        assert (arrays.offsets, tensors.offsets) == (None, None)
        assert tensors.ids.dtype == getattr(torch, dtype)
        for array, tensor in zip(arrays, tensors, strict=True):
            if array is not None:
                assert array.flags.writeable and np.array_equal(array, tensor.numpy())
                shared = torch.from_dlpack(array)
                assert shared.data_ptr() == array.ctypes.data and torch.equal(shared, tensor)
    empty = tokenizer.encode_ragged([])
    assert (empty.ids.tolist(), empty.cu_seqlens.tolist()) == ([], [0])


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ("a", {}, TypeError, "texts: expected a sequence of str or bytes, got str"),
        (["a"], {"max_length": 1}, ValueError, "max_length: 1 leaves no room"),
        (["a"], {"max_length": -1}, ValueError, "max_length: expected an int of at least 0, got -1"),
        (["a"], {"return_tensors": "tf"}, ValueError, "return_tensors: expected 'pt', 'np' or None, got 'tf'"),
        (["a"], {"return_tensors": None}, ValueError, "return_tensors: expected 'pt' or 'np', got None"),
        (["a", ("b", "c")], {}, TypeError, r"texts\[1\]: expected str or bytes, got tuple"),
        (["a"], {"dtype": "int16"}, ValueError, "dtype: expected 'int32' or 'int64', got 'int16'"),
    ],
)
def test_bad_ragged(
    texts: Any, options: dict[str, Any], error: type[Exception], message: str, ours: Callable[..., BertTokenizer]
) -> None:
    with pytest.raises(error, match=message):
        ours().encode_ragged(texts, **options)
