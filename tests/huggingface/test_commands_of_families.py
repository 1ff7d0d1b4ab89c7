"""Commands that make vectors and scores, on checkpoints of every family, against the libraries that they come from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import fuse, why_not
from bert_fast.cli import main
from bert_fast.errors import CheckpointError
from bert_fast.huggingface import sentence_models
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes import CrossEncoder, Embedder

pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the tokenizers of the tests are those of transformers 5", allow_module_level=True)
from tests.huggingface.sentence_folders import TEXTS, make_checkpoint, make_folder, make_tokenizer  # noqa: E402
from tests.tokenization.native_core import needs_native  # noqa: E402

pytestmark = needs_native

FAMILIES = ["Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "MPNet"]


@pytest.mark.parametrize("prefix", FAMILIES)
def test_vectors(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Embedder` and a fused SentenceTransformer, whose texts are packed, against sentence-transformers."""
    model = make_folder(prefix, tmp_path, "cls" if prefix == "Roberta" else "mean")
    wanted = model.encode(TEXTS)
    embedder = Embedder.from_pretrained(tmp_path / "folder", batch_tokens=40)
    assert embedder.model.config.model_type == model[0].model.config.model_type and embedder.normalize
    assert np.abs(embedder.embed(TEXTS) - wanted).max() < ABSOLUTE["sentence_embeddings"]

    packed = []
    original = sentence_models._packed
    monkeypatch.setattr(sentence_models, "_packed", lambda *args: packed.append(original(*args)) or packed[-1])
    assert not why_not(fuse(model))
    assert np.abs(model.encode(TEXTS) - wanted).max() < ABSOLUTE["sentence_embeddings"]
    assert len(packed) == 1 and packed[0] is not None


@pytest.mark.parametrize("prefix", FAMILIES)
def test_scores_of_pairs(prefix: str, tmp_path: Path) -> None:
    make_checkpoint(prefix, tmp_path, "ForSequenceClassification", num_labels=1)
    model = getattr(transformers, f"{prefix}ForSequenceClassification").from_pretrained(tmp_path).eval()
    tokenizer = make_tokenizer(prefix)
    batch = tokenizer(TEXTS, TEXTS[::-1], truncation=True, max_length=20, padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = model(**batch).logits[:, 0].numpy()
    found = CrossEncoder.from_pretrained(tmp_path, batch_tokens=45).scores(TEXTS, TEXTS[::-1])
    assert np.abs(found - wanted).max() < 0.001 * np.ptp(wanted)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bert-fast embed` of a file, and what it says about models that it does not take."""
    model = make_folder("XLMRoberta", tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    output, folder = tmp_path / "vectors.npy", tmp_path / "folder"
    capsys.readouterr()
    assert main.main(["embed", str(folder), str(tmp_path / "texts.txt"), "-o", str(output), "--quiet"]) == 0
    assert np.abs(np.load(output) - model.encode(TEXTS)).max() < ABSOLUTE["sentence_embeddings"]
    assert "Loading" not in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    for change, said in [
        ({"model_type": "gpt2"}, "model_type: expected one of bert, camembert, distilbert"),
        ({"num_hidden_layers": 3}, "expected the whole model, missing or of other shapes: encoder.layer.2"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | change))
        assert main.main(["embed", str(folder), str(tmp_path / "texts.txt"), "-o", str(output), "--quiet"]) == 1
        assert said in capsys.readouterr().err
        with pytest.raises(CheckpointError, match=said):
            Embedder.from_pretrained(folder)


def test_tokenizer_that_is_not_ours(tmp_path: Path) -> None:
    """RoBERTa's byte-level BPE."""
    make_checkpoint("Roberta", tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"] = {"type": "BPE", "vocab": {"<s>": 0, "a": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="expected a WordPiece model, got BPE, which transformers' tokenizers read"):
        Embedder.from_pretrained(tmp_path)


@pytest.mark.parametrize("prefix", FAMILIES[1:])
def test_finetuning_names_what_to_use(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recipes train BERT alone."""
    make_checkpoint(prefix, tmp_path / "model")
    (tmp_path / "train.csv").write_text("text,label\na small house,1\nred,0\n")
    arguments: list[Any] = ["finetune", "classify", "--model", tmp_path / "model", "--train", tmp_path / "train.csv"]
    arguments += ["--output-dir", tmp_path / "run", "--epochs", 1]
    assert main.main([str(each) for each in arguments]) != 0
    said = capsys.readouterr().err
    assert "model_type" in said and "bert_fast.fuse" in said
