"""Checkpoints of every family: sentence-transformers' models of them, fused, and what commands say about them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import fuse, why_not
from bert_fast.cli import main
from bert_fast.huggingface import sentence_models
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.tokenization import load_tokenizer

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the tokenizers of the tests are those of transformers 5", allow_module_level=True)
from tests.huggingface.families import CONFIG  # noqa: E402
from tests.huggingface.sentence_folders import (  # noqa: E402
    TEXTS,
    deberta_tokenizer,
    make_checkpoint,
    make_folder,
    make_tokenizer,
)
from tests.tokenization.native_core import needs_native  # noqa: E402

pytestmark = needs_native

FAMILIES = ["Bert", *CONFIG]


def keep_packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What texts of fused models are packed to from here on: None where they are not."""
    packed: list[Any] = []
    original = sentence_models._packed
    monkeypatch.setattr(sentence_models, "_packed", lambda *args: packed.append(original(*args)) or packed[-1])
    return packed


@pytest.mark.parametrize("prefix", FAMILIES)
def test_vectors(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused SentenceTransformer, whose texts are packed, against an untouched one."""
    model = make_folder(prefix, tmp_path, "cls" if prefix == "Roberta" else "mean")
    wanted = model.encode(TEXTS)
    packed = keep_packed(monkeypatch)
    assert not why_not(fuse(model))
    assert np.abs(model.encode(TEXTS) - wanted).max() < ABSOLUTE["sentence_embeddings"]
    assert len(packed) == 1 and packed[0] is not None


@pytest.mark.parametrize("prefix", FAMILIES)
def test_scores_of_pairs(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused CrossEncoder likewise, against transformers."""
    make_checkpoint(prefix, tmp_path, "ForSequenceClassification", num_labels=1)
    model = getattr(transformers, f"{prefix}ForSequenceClassification").from_pretrained(tmp_path).eval()
    tokenizer = make_tokenizer(prefix)
    batch = tokenizer(TEXTS, TEXTS[::-1], truncation=True, max_length=20, padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = model(**batch).logits[:, 0].numpy()
    packed = keep_packed(monkeypatch)
    fused = fuse(sentence_transformers.CrossEncoder(str(tmp_path), device="cpu"))
    # These heads pass nothing on to the encoder: texts come to it padded.
    passes_offsets = prefix not in ("MPNet", "DebertaV2")
    assert bool(why_not(fused)) is not passes_offsets
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    found = fused.predict(pairs, activation_fn=torch.nn.Identity())
    assert np.abs(found - wanted).max() < 0.001 * np.ptp(wanted)
    assert len(packed) == passes_offsets and None not in packed


def test_pairs_of_a_deberta_tokenizer_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their types among them; a BERT stands for the model."""
    make_checkpoint("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    deberta_tokenizer().save_pretrained(tmp_path)
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    model = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    assert type(model.tokenizer) is transformers.DebertaV2Tokenizer
    wanted = model.predict(pairs, activation_fn=torch.nn.Identity())
    packed = keep_packed(monkeypatch)
    assert not why_not(fuse(model))
    found = model.predict(pairs, activation_fn=torch.nn.Identity())
    assert np.abs(found - wanted).max() < 0.001 * np.ptp(wanted)
    (batch,) = packed
    assert set(batch["token_type_ids"].tolist()) == {0, 1}


def test_tokenizer_that_is_not_ours(tmp_path: Path) -> None:
    """RoBERTa's byte-level BPE."""
    make_checkpoint("Roberta", tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"] = {"type": "BPE", "vocab": {"<s>": 0, "a": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="expected a WordPiece model, got BPE, which transformers' tokenizers read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("prefix", FAMILIES[1:])
def test_finetuning_names_what_to_use(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands train BERT alone."""
    make_checkpoint(prefix, tmp_path / "model")
    (tmp_path / "train.csv").write_text("text,label\na small house,1\nred,0\n")
    arguments: list[Any] = ["finetune", "classify", "--model_name_or_path", tmp_path / "model"]
    arguments += ["--train_file", tmp_path / "train.csv", "--output_dir", tmp_path / "run"]
    capsys.readouterr()
    assert main.main([str(each) for each in arguments]) == 1
    said = capsys.readouterr().err
    assert "model_type" in said and "bert_fast.fuse" in said and said.count("\n") == 1
