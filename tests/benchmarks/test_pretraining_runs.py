"""Pre-training beside transformers, probes, pictures: on a model of one layer and a text of few words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kit.markdown import page_with
from benchmarks.pretraining import __main__ as command
from benchmarks.pretraining import picture, tables
from benchmarks.pretraining.beside import beside, padded, summary
from benchmarks.pretraining.probe import _shuffled, names_in, probe
from bert_fast import BertConfig, BertForPreTraining, BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.testing.tolerances import RELATIVE

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ["alice", "whale", "walked", "the", "and", ".", "##s", "ship", "sea", "cat"]
TOKENIZER = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    draw = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("text")
    words = [word for word in WORDS if not word.startswith("##")]
    documents = ["\n".join(" ".join(draw.choice(words, 7)) for _ in range(8)) for _ in range(6)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return tokenize_files([folder / "text.txt"], folder / "store", TOKENIZER)


@pytest.fixture
def source(store: TokenStore) -> PretrainingSource:
    return PretrainingSource(store, TOKENIZER, max_length=24)


def make_config() -> BertConfig:
    return BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_transformers(source: PretrainingSource) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pairs = list(beside(make_config(), source, 40, 96))
    assert len(pairs) == 40
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        bound = RELATIVE["training_loss_50_steps"]
        assert all(abs(ours[name] - theirs[name]) < bound * max(1, theirs[name]) for name in ours)
    losses = [ours["masked_lm"] for ours, _ in pairs]
    assert max(losses) - min(losses) > 0.2, "nothing was trained"
    assert summary(pairs)["steps"] == 40


def test_dropout_is_refused(source: PretrainingSource) -> None:
    config = make_config()
    config.hidden_dropout_prob = 0.1
    with pytest.raises(ValueError, match="config: expected no dropout"):
        next(beside(config, source, 1))


def test_padded_batches_hold_the_same(source: PretrainingSource) -> None:
    batch = source.batch(0, np.arange(3))
    made = padded(batch)
    keep = made["attention_mask"].bool()
    assert torch.equal(made["input_ids"][keep], batch["input_ids"])
    assert torch.equal(made["labels"][made["labels"] >= 0], batch["labels"])
    assert not made["input_ids"][~keep].any() and (made["labels"][~keep] == -100).all()


def test_a_probe_counts_every_word(source: PretrainingSource, store: TokenStore) -> None:
    torch.manual_seed(0)
    found = probe(BertForPreTraining(make_config()).eval(), source, store, frozenset({"alice"}))
    assert sum(kind["number"] for kind in found["kinds"].values()) == found["masked"]
    mean = sum(kind["number"] * kind["loss"] for kind in found["kinds"].values()) / found["masked"]
    assert round(mean - found["masked_lm"], 3) == 0
    assert {"name", "function", "sign"} <= found["kinds"].keys() and 0 <= found["next_sentence_accuracy"] <= 1


def test_shuffling_keeps_words_in_their_text_and_masks_in_their_place(source: PretrainingSource) -> None:
    batch = source.batch(0, np.arange(len(source.lengths(0))))
    mixed, ids = _shuffled(batch, TOKENIZER.all_special_ids, np.random.default_rng(0)), batch["input_ids"].numpy()
    places = batch["masked_lm_positions"].numpy()
    assert (mixed[places] == ids[places]).all() and (mixed != ids).mean() > 0.3
    sequence = np.repeat(np.arange(len(batch["cu_seqlens"]) - 1), np.diff(batch["cu_seqlens"].numpy()))
    text = 2 * sequence + batch["token_type_ids"].numpy()
    for number in np.unique(text):
        assert sorted(mixed[text == number]) == sorted(ids[text == number])
    special = np.isin(ids, TOKENIZER.all_special_ids)
    assert (mixed[special] == ids[special]).all()


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Then Alice saw it, Alice ran, and Alice fell.\nThe cat saw The cat.\n" * 2)
    assert names_in(path) == {"alice"}


def test_the_picture_has_the_newest_line_of_each_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stored = tmp_path / "stored.jsonl"
    with pytest.raises(SystemExit, match="no curves"):
        picture.draw(stored, tmp_path / "picture.svg")
    evaluations = [{"step": 5, "masked_lm": 6.0}, {"step": 10, "masked_lm": 5.25}]
    curve = [[1, 7.0], [10, 5.5]]
    lines = [
        {
            "kind": "learned",
            "name": "run",
            "curve": curve,
            "evaluations": evaluations,
            "found": {"context_free_loss": 6},
        },
        {"kind": "beside", "initializer_range": 0.05, "curve": [[1, 7.0, 7.0], [9, 6.0, 6.0]]},
        {"kind": "ablation", "name": "LAMB", "curve": curve, "evaluations": [{"step": 10, "masked_lm": 9.75}]},
        {"kind": "ablation", "name": "LAMB", "curve": curve, "evaluations": evaluations},
        {"kind": "memory", "batches": 3},
    ]
    stored.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = picture.draw(stored, tmp_path / "picture.svg").read_text()
    assert text.startswith("<svg") and "LAMB (5.25)" in text and "9.75" not in text


def test_the_table_has_the_newest_runs_of_searched_rates(tmp_path: Path) -> None:
    def line(start: str, seed: int, accuracy: float, **others: Any) -> dict[str, Any]:
        return {
            "kind": "finetuned",
            "case": "tags",
            "start": start,
            "seed": seed,
            "metrics": {"accuracy": accuracy},
        } | others

    lines = [line("random", 0, 0.1), line("random", 0, 0.2, learning_rate=1e-3)]
    lines += [line("random", 0, 0.5, learning_rate=3e-3), line("random", 1, 0.7, learning_rate=3e-3)]
    lines += [line("pre-trained", 0, 0.25), line("pre-trained", 1, 0.75)]
    stored = tmp_path / "stored.jsonl"
    stored.write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = tables.tables(stored)["finetuned"].splitlines()[2:]
    assert rows == [
        "| parts of speech, 2,001 sentences | random | 0.003 | 0.500, 0.700 | 0.600 ± 0.141 |",
        "| parts of speech, 2,001 sentences | pre-trained | given | 0.250, 0.750 | 0.500 ± 0.354 |",
    ]


def test_the_page_shows_what_is_stored() -> None:
    made = tables.tables(command.STORED)
    page = tables.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in made)
    assert page_with(page, made) == page, "run `python -m benchmarks.pretraining tables --write`"
