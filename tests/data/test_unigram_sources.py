"""Examples of all tasks with XLM-R's tokenizer: two separators, no types, words by the mark of a space."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertModel, XLMRobertaTokenizer
from bert_fast.data import PretrainingSource, TokenStore, tokenize_files
from bert_fast.data.masking import Masking
from bert_fast.data.sequences import Sequences
from bert_fast.data.token_store import tokenizer_hash
from bert_fast.errors import StoreError
from bert_fast.tokenization import BertTokenizer, load_tokenizer
from bert_fast.training.tasks import task_named
from tests.data.corpora import rows_of
from tests.tokenization.native_core import needs_native
from tests.tokenization.unigram_core import forms, make_state, metaspace, trained_pieces

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytestmark = needs_native

NAMED = {"unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"}


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xlm-r")
    (path / "tokenizer.json").write_text(json.dumps(make_state(trained_pieces(shared_data), forms()["xlm-r"])))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> XLMRobertaTokenizer:
    made = load_tokenizer(folder)
    assert isinstance(made, XLMRobertaTokenizer)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **NAMED)


@pytest.fixture(scope="module")
def lines(shared_data: Path) -> list[str]:
    text = (shared_data / "pretrain_en" / "books_valid.txt").read_text(encoding="utf-8")
    return [line for line in text.split("\n") if line][:300]


def task_of(name: str, tokenizer: XLMRobertaTokenizer, **arguments: Any) -> Any:
    kind = task_named(name)
    return kind(kind.Arguments(**arguments), tokenizer)


@pytest.mark.parametrize("truncation", ["longest_first", "only_first", "only_second"])
def test_pairs(tokenizer: XLMRobertaTokenizer, theirs: Any, lines: list[str], truncation: str) -> None:
    if truncation == "longest_first":
        first, second, max_length = [*lines[:80], "", "x"], [*lines[80:160], "y", ""], 40
    else:
        first = second = [line[:60] + " x" * 90 for line in lines[:40]]
        max_length = 260
    found = Sequences.joined(tokenizer, first, second, max_length=max_length, truncation=truncation)
    wanted = theirs(first, second, truncation=truncation, max_length=max_length)["input_ids"]
    assert rows_of(found) == wanted
    assert {len(row) for row in wanted} >= {max_length}
    batch = found.gather(np.arange(2))
    assert not batch.token_type_ids.any() and "position_ids" not in batch
    packed = tokenizer.pack(first, second, max_length=max_length)
    if truncation == "longest_first":
        assert packed.input_ids.tolist() == found.ids.tolist() and "position_ids" not in packed


def test_a_model_of_bert_with_its_words(tokenizer: XLMRobertaTokenizer, lines: list[str]) -> None:
    """As multilingual MiniLM: packed as padded."""
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        pad_token_id=1,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    padded = tokenizer(lines[:9], lines[9:18], padding=True, return_tensors="pt")
    packed = tokenizer.pack(lines[:9], lines[9:18])
    with torch.inference_mode():
        wanted = model(**padded).last_hidden_state[padded["attention_mask"].bool()]
        found = model(**packed).last_hidden_state
    torch.testing.assert_close(found, wanted)


def test_windows_of_questions(tokenizer: XLMRobertaTokenizer, theirs: Any, lines: list[str]) -> None:
    contexts = [" ".join(lines[start : start + 6]) for start in range(0, 60, 6)]
    questions = [" ".join(line.split()[:5]) for line in lines[100:110]]
    answers = [context.split()[20] for context in contexts]
    rows = [
        {"id": str(i), "question": q, "context": c, "answers": [{"text": a, "answer_start": c.index(f" {a}") + 1}]}
        for i, (q, c, a) in enumerate(zip(questions, contexts, answers, strict=True))
    ]
    examples = task_of("qa", tokenizer, max_seq_length=48, doc_stride=8).read(rows)
    wanted = theirs(
        questions, contexts, truncation="only_second", max_length=48, stride=8, return_overflowing_tokens=True
    )["input_ids"]
    assert rows_of(examples.sequences) == wanted and len(wanted) > 20
    spans = zip(examples.labels["start_positions"].tolist(), examples.labels["end_positions"].tolist(), strict=True)
    found = 0
    for row, question, (start, end) in zip(wanted, examples.row_of.tolist(), spans, strict=True):
        if start:
            assert answers[question] in tokenizer.decode(row[start : end + 1])
            found += 1
    assert found >= 10
    assert len(task_of("qa", tokenizer, max_seq_length=8, doc_stride=8).read(rows[:1])) > 100


def test_labelled_words(tokenizer: XLMRobertaTokenizer, theirs: Any, lines: list[str]) -> None:
    rows = [{"tokens": line.split(), "ner_tags": [f"T{len(w) % 3}" for w in line.split()]} for line in lines[:60]]
    task = task_of("ner", tokenizer, max_seq_length=400)
    examples = task.read(rows)
    assert len(examples) == len(rows)
    labels = np.split(examples.labels["labels"], examples.sequences.boundaries[1:-1])
    for row, ids, found in zip(rows, rows_of(examples.sequences), labels, strict=True):
        wanted = theirs(row["tokens"], is_split_into_words=True)
        words, before = wanted.word_ids(), None
        assert ids == wanted["input_ids"]
        expected = []
        for word in words:
            is_first = word is not None and word != before
            expected.append(task.labels.index(row["ner_tags"][word]) if is_first else -100)
            before = word
        assert found.tolist() == expected
    short = task_of("ner", tokenizer, max_seq_length=12).read(rows)
    assert max(short.lengths(0)) == 12 and len(short) > 3 * len(rows)


def test_stores_and_masked_words(tokenizer: XLMRobertaTokenizer, lines: list[str], tmp_path: Path) -> None:
    text = "\n\n".join("\n".join(lines[start : start + 10]) for start in range(0, 300, 10))
    (tmp_path / "texts.txt").write_text(text + "\n", encoding="utf-8")
    store = tokenize_files([tmp_path / "texts.txt"], tmp_path / "store", tokenizer)
    assert len(store) == 30 and store.tokens.dtype == np.uint16
    assert store[3].tolist() == tokenizer.encode_ragged(lines[30:40], add_special_tokens=False).ids.tolist()
    for next_sentence in (False, True):
        source = PretrainingSource(
            store, tokenizer, max_length=33, next_sentence=next_sentence, whole_words=True, mask_probability=0.3
        )
        count = len(source.lengths(0))
        batch = source.batch(0, np.arange(count))
        ids, ends = batch["input_ids"].clone(), batch["cu_seqlens"].tolist()
        ids[batch["masked_lm_positions"]] = batch["labels"]
        chosen = np.zeros(len(ids), dtype=bool)
        chosen[batch["masked_lm_positions"]] = True
        num_special = 4 if next_sentence else 2
        for start, stop in itertools.pairwise(ends):
            row = ids[start:stop].tolist()
            assert row[0] == 0 and row[-1] == 2 and row.count(2) == num_special - 1 and len(row) <= 33
            if next_sentence:
                middle = row.index(2)
                assert row[middle + 1] == 2
            # A word is masked as a whole: the library's words are what its marks say.
            names = tokenizer.convert_ids_to_tokens(row)
            for place in range(1, len(row)):
                is_inside = names[place][0] != "▁" and row[place] > 3 and row[place - 1] > 3
                assert not is_inside or chosen[start + place] == chosen[start + place - 1]
        assert chosen.mean() > 0.2 and not batch["token_type_ids"].any() and "position_ids" not in batch
        assert int(source.lengths(0).max()) > 28
        assert source.max_labels(330) == 330
    with pytest.raises(ValueError, match="max_length: expected 6"):
        PretrainingSource(store, tokenizer, max_length=5)


def test_unknown_characters_stand_within_words(tokenizer: XLMRobertaTokenizer) -> None:
    """<unk> is not masked, and parts no word."""
    ids = np.array(tokenizer("a wo\U0001f9ffrd in\U0001f9ff it")["input_ids"])
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    masking = Masking(tokenizer, whole_words=True, mask_probability=0.4)
    cu_seqlens, words = np.array([0, len(ids)]), 4
    starts = [place for place, name in enumerate(names) if name[0] == "▁"]
    assert names.count("<unk>") == 2 and len(starts) == words
    for seed in range(40):
        positions = set(masking(ids, cu_seqlens, np.array([0]), seed, 0).positions.tolist())
        whole = [set(range(a, b)) - {names.index("<unk>"), len(names) - 1 - names[::-1].index("<unk>")}
                 for a, b in zip(starts, [*starts[1:], len(ids) - 1], strict=True)]  # fmt: skip
        assert all(not positions & word or word <= positions for word in whole)
        assert sum(word <= positions for word in whole) in (1, 2)


def test_which_tokenizer_made_a_store(folder: Path, tokenizer: XLMRobertaTokenizer, tmp_path: Path) -> None:
    """Its hash: what decides about ids, scores among them; of a saved copy the same."""
    tokenizer.save_pretrained(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    again.add_tokens(["covid"])
    state = json.loads((folder / "tokenizer.json").read_text())
    others = [again, BertTokenizer(["[UNK]", "[SEP]", "[CLS]", "[PAD]", "[MASK]", "a"])]
    state["model"]["vocab"][50][1] -= 1e-9
    others.append(XLMRobertaTokenizer(state))
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"] = None
    others.append(XLMRobertaTokenizer(state))
    hashes = {tokenizer_hash(each) for each in [tokenizer, *others]}
    assert len(hashes) == 5
    (tmp_path / "a.txt").write_text("a word\n")
    tokenize_files([tmp_path / "a.txt"], tmp_path / "store", tokenizer)
    assert len(TokenStore.open(tmp_path / "store", load_tokenizer(folder))) == 1
    with pytest.raises(StoreError, match="was made with another tokenizer"):
        TokenStore.open(tmp_path / "store", others[2])


def test_texts_and_pairs(tokenizer: XLMRobertaTokenizer, theirs: Any, lines: list[str]) -> None:
    rows = [{"text": a, "pair": b, "label": str(i % 2)} for i, (a, b) in enumerate(itertools.pairwise(lines[:41]))]
    wanted = theirs(lines[:40], lines[1:41], truncation=True, max_length=60)["input_ids"]
    examples = task_of("classify", tokenizer, max_seq_length=60, text_pair_column_name="pair").read(rows)
    assert rows_of(examples.sequences) == wanted and "position_ids" not in examples.batch(0, np.arange(2))
    wanted = theirs(lines[:40], truncation=True, max_length=20)["input_ids"]
    assert rows_of(task_of("classify", tokenizer, max_seq_length=20).read(rows).sequences) == wanted


def test_choices(tokenizer: XLMRobertaTokenizer, theirs: Any, lines: list[str]) -> None:
    starts = range(0, 80, 4)
    rows = [dict(zip(("sent1", "sent2", "ending0", "ending1"), lines[i : i + 4], strict=True)) for i in starts]
    firsts = [row["sent1"] for row in rows for _ in range(2)]
    seconds = [f"{row['sent2']} {row[ending]}" for row in rows for ending in ("ending0", "ending1")]
    wanted = theirs(firsts, seconds, truncation=True, max_length=48)["input_ids"]
    examples = task_of("choice", tokenizer, max_seq_length=48).read(rows, is_labelled=False)
    assert rows_of(examples.sequences) == wanted and len(examples) == len(rows)


def test_answers_begin_with_a_word(shared_data: Path) -> None:
    """Where Metaspace stands alone, a token's characters are those of the space in front of it, too."""
    form = forms()["xlm-r"] | {"pre_tokenizer": metaspace()}
    tokenizer = XLMRobertaTokenizer(make_state(trained_pieces(shared_data), form))
    task = task_of("qa", tokenizer, max_seq_length=48)
    examples = task.read([{"question": "Who ran?", "context": "He and Mary ran to Oslo"}], is_labelled=False)
    place = tokenizer.convert_ids_to_tokens(examples.sequences.ids.tolist()).index("▁to")
    scores = np.zeros(len(examples.sequences.ids), dtype=np.float32)
    scores[place] = 9
    (said,) = task.rows(examples, (scores, scores))
    assert examples.details["characters"][place, 0] == 15, "the space counts"
    assert (said["answer"], said["candidates"][0]["start"]) == ("to", 16)
