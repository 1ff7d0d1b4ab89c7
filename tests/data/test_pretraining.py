"""Pre-training batches: what they are made of, the same wherever they are made."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bert_fast import BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.batches import Batches, Source, only
from bert_fast.data.pretraining import PretrainingSource, unigram_entropy
from bert_fast.data.pretraining_texts import Texts, full_sentences, sentence_pairs
from bert_fast.errors import StoreError
from bert_fast.tokenization.pack import PackedBatch

from .corpora import SPECIAL, WORDS, make_store, make_tokenizer, random_documents

CLS, SEP, MASK = 2, 3, 4


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus"), random_documents(7, 40))


def unmasked(batch: PackedBatch) -> np.ndarray:
    """The tokens that were there."""
    ids = batch["input_ids"].numpy().copy()
    ids[batch["masked_lm_positions"].numpy()] = batch["labels"].numpy()
    return ids


def entries(batch: PackedBatch) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize("whole_words", [False, True])
def test_pairs_are_those_of_the_plan(store: TokenStore, tokenizer: BertTokenizer, whole_words: bool) -> None:
    source = PretrainingSource(store, tokenizer, max_length=48, seed=5, whole_words=whole_words)
    assert isinstance(source, Source)
    plan = sentence_pairs(Texts(store), 45, seed=5, epoch=3)
    lengths = source.lengths(3)
    assert lengths.dtype == np.int32 and len(lengths) == len(plan.a_start)
    indices = np.random.default_rng(0).permutation(len(lengths))
    batch = source.batch(3, indices)
    ids, types, positions = unmasked(batch), batch["token_type_ids"].tolist(), batch["position_ids"].tolist()
    assert batch["cu_seqlens"].dtype == torch.int32
    cu_seqlens = batch["cu_seqlens"].tolist()
    assert batch["max_seqlen"] == lengths.max() and cu_seqlens[-1] == len(ids) == lengths.sum()
    for number, index in enumerate(indices.tolist()):
        first = store.tokens[plan.a_start[index] : plan.a_stop[index]].tolist()
        second = store.tokens[plan.b_start[index] : plan.b_stop[index]].tolist()
        part = slice(cu_seqlens[number], cu_seqlens[number + 1])
        assert ids[part].tolist() == [CLS, *first, SEP, *second, SEP]
        assert types[part] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert positions[part] == list(range(lengths[index]))
    assert batch["next_sentence_label"].tolist() == plan.is_random[indices].astype(int).tolist()
    for name in ("input_ids", "token_type_ids", "position_ids", "labels", "masked_lm_positions", "next_sentence_label"):
        assert batch[name].dtype == torch.int64
    assert len(batch["labels"]) > 0 and (batch["labels"] >= len(SPECIAL)).all()


def test_texts_are_those_of_the_plan(store: TokenStore, tokenizer: BertTokenizer) -> None:
    source = PretrainingSource(store, tokenizer, max_length=48, next_sentence=False)
    plan = full_sentences(Texts(store), 46)
    assert source.lengths(0).tolist() == source.lengths(9).tolist() == (plan.stops - plan.starts + 2).tolist()
    indices = np.array([5, 0, 5, len(plan.starts) - 1])
    batch = source.batch(1, indices)
    assert "next_sentence_label" not in batch and not batch["token_type_ids"].any()
    ids, cu_seqlens = unmasked(batch), batch["cu_seqlens"].tolist()
    for number, index in enumerate(indices.tolist()):
        text = store.tokens[plan.starts[index] : plan.stops[index]].tolist()
        assert ids[cu_seqlens[number] : cu_seqlens[number + 1]].tolist() == [CLS, *text, SEP]


@pytest.mark.parametrize("next_sentence", [True, False])
def test_an_example_is_the_same_in_any_batch(store: TokenStore, tokenizer: BertTokenizer, next_sentence: bool) -> None:
    source = PretrainingSource(store, tokenizer, max_length=40, next_sentence=next_sentence)
    together = entries(source.batch(0, np.arange(20)))
    for index in range(20):
        alone = entries(source.batch(0, np.array([index])))
        part = slice(*together["cu_seqlens"][index : index + 2])
        for name in ("input_ids", "token_type_ids", "position_ids"):
            assert together[name][part] == alone[name]
        inside = [part.start <= place < part.stop for place in together["masked_lm_positions"]]
        labels = [label for label, is_inside in zip(together["labels"], inside, strict=True) if is_inside]
        assert labels == alone["labels"]


def test_epochs_and_seeds_differ(store: TokenStore, tokenizer: BertTokenizer) -> None:
    indices = np.arange(8)
    for next_sentence in (True, False):
        sources = [PretrainingSource(store, tokenizer, next_sentence=next_sentence, seed=seed) for seed in (0, 0, 1)]
        first = entries(sources[0].batch(0, indices))
        assert entries(sources[0].batch(1, indices)) != first
        assert entries(sources[0].batch(0, indices)) == first == entries(sources[1].batch(0, indices))
        assert entries(sources[2].batch(0, indices)) != first


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_make_the_same_batches(
    store: TokenStore, tokenizer: BertTokenizer, num_workers: int, context: str
) -> None:
    if context == "spawn" and num_workers != 1:
        pytest.skip("one process that starts from nothing is enough")
    batches = Batches(PretrainingSource(store, tokenizer, max_length=64), max_tokens=512)
    expected = [entries(batches.batch(1, number)) for number in range(len(batches.plan(1)))]
    loader = DataLoader(
        batches.epoch(1), batch_size=None, num_workers=num_workers,
        multiprocessing_context=context if num_workers else None,
    )  # fmt: skip
    assert [entries(batch) for batch in loader] == expected


def test_two_processes_share_the_batches_of_one(store: TokenStore, tokenizer: BertTokenizer) -> None:
    """Each takes every second batch of the same plan, from sources of its own."""
    one, *two = [Batches(PretrainingSource(store, tokenizer), max_tokens=1024, seed=2) for _ in range(3)]
    expected = [entries(one.batch(0, number)) for number in range(len(one.plan(0)))]
    found = [entries(two[number % 2].batch(0, number)) for number in range(len(expected))]
    assert found == expected and len(expected) > 3


def test_pickles_open_the_store_again(store: TokenStore, tokenizer: BertTokenizer) -> None:
    source = PretrainingSource(
        store, tokenizer, max_length=77, whole_words=True, mask_probability=0.3, seed=9, short_sequence_probability=0.5
    )
    source.lengths(0)
    again = pickle.loads(pickle.dumps(source))
    assert entries(again.batch(2, np.arange(9))) == entries(source.batch(2, np.arange(9)))
    assert again.store.path == store.path and len(pickle.dumps(source)) < 20_000
    other = pickle.loads(pickle.dumps(PretrainingSource(store, tokenizer, next_sentence=False)))
    assert not other.next_sentence


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize(("whole_words", "p"), [(False, 0.15), (True, 0.15), (False, 1.0)])
def test_batches_keep_to_their_budget(
    store: TokenStore, tokenizer: BertTokenizer, next_sentence: bool, whole_words: bool, p: float
) -> None:
    source = PretrainingSource(
        store, tokenizer, max_length=32, next_sentence=next_sentence, whole_words=whole_words, mask_probability=p
    )
    for limits in ({"max_tokens": 200}, {"batch_size": 6}, {"max_tokens": 200, "batch_size": 8}):
        batches = Batches(source, **limits)  # type: ignore[arg-type]
        budget = batches.budget()
        for epoch in range(3):
            assert not any(budget.reasons_against(batch) for batch in batches.epoch(epoch))
    assert Batches(source, max_tokens=16384, batch_size=128).budget().max_labels == (
        16384 if whole_words or p == 1.0 else int(0.15 * 16384) + 128
    )


def test_models_take_the_batches(store: TokenStore, tokenizer: BertTokenizer) -> None:
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    for model, next_sentence in ((BertForPreTraining(config), True), (BertForMaskedLM(config), False)):
        source = PretrainingSource(store, tokenizer, max_length=64, next_sentence=next_sentence)
        for batch in (source.batch(0, np.arange(10)), source.batch(0, np.array([int(source.lengths(0).argmin())]))):
            loss = model(**batch).loss
            assert torch.isfinite(loss)
            loss.backward()


def test_decoded_examples(store: TokenStore, tokenizer: BertTokenizer) -> None:
    for next_sentence in (True, False):
        source = PretrainingSource(store, tokenizer, next_sentence=next_sentence, mask_probability=0.5)
        for index in range(5):
            words = source.decode(0, index).split(" ")
            batch = source.batch(0, np.array([index]))
            shown, there = batch["input_ids"].tolist(), unmasked(batch).tolist()
            masked = set(batch["masked_lm_positions"].tolist())
            for place, word in enumerate(words[: len(shown)]):
                was, now = tokenizer.convert_ids_to_tokens([there[place], shown[place]])
                expected = f"[{'MASK' if now == '[MASK]' else now}:{was}]" if place in masked else now
                assert word == expected
            end = " ".join(words[len(shown) :])
            label = int(batch["next_sentence_label"]) if next_sentence else 2
            assert end == ("(B follows A)", "(B is random)", "")[label]


def test_no_examples_at_all_in_a_batch(store: TokenStore, tokenizer: BertTokenizer) -> None:
    for next_sentence in (True, False):
        batch = PretrainingSource(store, tokenizer, next_sentence=next_sentence).batch(0, np.zeros(0, dtype=np.int64))
        assert batch.num_sequences == 0 and batch["max_seqlen"] == 0
        assert all(len(batch[name]) == 0 for name in ("input_ids", "token_type_ids", "labels", "masked_lm_positions"))


def test_bad_arguments(store: TokenStore, tokenizer: BertTokenizer, tmp_path: Path) -> None:
    for length, next_sentence in ((4, True), (2, False), (65537, True)):
        with pytest.raises(
            ValueError, match=f"max_length: expected {5 if next_sentence else 3} to 65536, got {length}"
        ):
            PretrainingSource(store, tokenizer, max_length=length, next_sentence=next_sentence)
    with pytest.raises(TypeError, match="max_length: expected an int, got float"):
        PretrainingSource(store, tokenizer, max_length=128.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"short_sequence_probability: expected 0 to 1, got 1\.5"):
        PretrainingSource(store, tokenizer, short_sequence_probability=1.5)
    with pytest.raises(ValueError, match="mask_probability: expected a number above 0"):
        PretrainingSource(store, tokenizer, mask_probability=0)
    with pytest.raises(StoreError, match="was made with another tokenizer"):
        PretrainingSource(store, BertTokenizer([*SPECIAL, *WORDS]))
    single = make_store(tmp_path / "single", [[5, 5]])
    with pytest.raises(StoreError, match=r"at least 2 documents .* got 1; .*next_sentence=False"):
        PretrainingSource(single, tokenizer)
    assert PretrainingSource(single, tokenizer, next_sentence=False).lengths(0).tolist() == [12]
    for next_sentence in (True, False):
        empty = make_store(tmp_path / f"empty{next_sentence}", [[0]], with_sentences=False)
        with pytest.raises(StoreError, match="has no tokens"):
            PretrainingSource(empty, tokenizer, next_sentence=next_sentence)


def test_hostile_text(tmp_path: Path) -> None:
    """Special tokens, unknown words, other scripts and mixed line ends in the text."""
    tokenizer = BertTokenizer([*SPECIAL, "a", "b", "你", "好", "##c"])
    path = tmp_path / "x.txt"
    path.write_bytes("a [MASK] [SEP] b\r\n\r\n\u3000\n你好你好 zzz\r\n[CLS]\n\nac a\na\n\n\n[PAD]\n".encode())
    store = tokenize_files([path], tmp_path / "store", tokenizer)
    for next_sentence in (True, False):
        for p in (0.15, 1.0):
            source = PretrainingSource(
                store, tokenizer, max_length=9, next_sentence=next_sentence, mask_probability=p, whole_words=True
            )
            for epoch in range(10):
                batch = source.batch(epoch, np.arange(len(source.lengths(epoch))))
                assert (batch["labels"] >= 5).all() and (p < 1 or len(batch["labels"]) > 0)


def test_unigram_entropy(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = tmp_path / "x.txt"
    path.write_text("w0 w0 w1 [MASK] unknown w2\n")
    store = tokenize_files([path], tmp_path / "store", tokenizer)
    assert unigram_entropy(store, tokenizer) == pytest.approx(1.5 * math.log(2))
    path.write_text("unknown\n")
    assert unigram_entropy(tokenize_files([path], tmp_path / "other", tokenizer), tokenizer) == 0


@pytest.mark.parametrize("next_sentence", [True, False])
def test_real_books(tmp_path: Path, shared_data: Path, next_sentence: bool) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    store = tokenize_files([shared_data / "pretrain_en" / "books_train.txt"], tmp_path / "store", tokenizer)
    source = PretrainingSource(store, tokenizer, next_sentence=next_sentence)
    batches = Batches(source, max_tokens=16384)
    plan = batches.plan(0)
    assert plan.fill > 0.98
    masked = maskable = 0
    seen = np.zeros(len(tokenizer), dtype=np.int64)
    for number in range(len(plan)):
        batch = batches.batch(0, number)
        ids = unmasked(batch)
        masked, maskable = masked + len(batch["labels"]), maskable + int((~np.isin(ids, [100, 101, 102])).sum())
        seen += np.bincount(ids, minlength=len(seen))
    # Each sequence rounds its 15 % for itself: the variance of a sum is at most a quarter for each.
    assert abs(masked - 0.15 * maskable) < 5 * math.sqrt(len(plan.order) / 4)
    if not next_sentence:
        expected = np.bincount(store.tokens, minlength=len(tokenizer))
        assert np.array_equal(np.delete(seen, [101, 102]), np.delete(expected, [101, 102]))
    assert 6 < unigram_entropy(store, tokenizer) < 7


def test_the_page_shows_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    page = Path(__file__).resolve().parents[2] / "docs" / "pretraining_data.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    Path("corpus.txt").write_text("w1 w2 w3\nw4 w5\n\nw6\nw7 w8 w9\n")
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.isfinite(names["loss"]) and names["unigram_entropy"] is unigram_entropy


def test_trainers_of_transformers_take_whole_batches(
    store: TokenStore, tokenizer: BertTokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    source = PretrainingSource(store, tokenizer, max_length=64)
    options = dict(
        output_dir=str(tmp_path), max_steps=3, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1
    )
    trainer = transformers.Trainer(
        BertForPreTraining(config),
        transformers.TrainingArguments(per_device_train_batch_size=1, disable_tqdm=True, **options),
        train_dataset=Batches(source, max_tokens=512).epoch(0),
        data_collator=only,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(3 < loss < 8 for loss in losses)
