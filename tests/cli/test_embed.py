"""`bert-fast embed`, and the Python under it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM, BertModel, BertTokenizer
from bert_fast.cli import main
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes import embedding
from bert_fast.training.recipes.embedding import Embedder, embed_files

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "é", "."]
TEXTS = ["a short text .", "", "texts " * 40, "é", "a", "short . " * 9]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model with a head, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(path)
    BertTokenizer(WORDS, do_lower_case=False).save_pretrained(path)
    return path


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_vectors_are_those_of_texts_alone(folder: Path, pooling: embedding.Pooling) -> None:
    """Against the model on one padded text at a time, pooled by hand."""
    embedder = Embedder.from_pretrained(folder, pooling=pooling, batch_tokens=20)
    model, tokenizer = embedder.model, embedder.tokenizer
    found = embedder.embed(TEXTS)
    assert found.shape == (len(TEXTS), 16) and found.dtype == np.float32
    for vector, text in zip(found, TEXTS, strict=True):
        ids = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**ids).last_hidden_state[0]
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling]
        assert np.abs(vector - expected.numpy()).max() < ABSOLUTE["minilm_embeddings"]
    unit = Embedder(model, tokenizer, pooling=pooling, normalize=True).embed(TEXTS)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    assert np.abs(unit - found / lengths).max() < ABSOLUTE["minilm_embeddings"]
    assert embedder.embed([]).shape == (0, 16)


def test_real_weights(minilm_dir: Path, shared_data: Path) -> None:
    stored = np.load(shared_data / "fixtures" / "minilm" / "embeddings.npz")["mean_pooled_normalized"]
    rows = json.loads((shared_data / "fixtures" / "minilm" / "texts.json").read_text())
    single = [row for row in rows if row["pair"] is None]
    embedder = Embedder.from_pretrained(minilm_dir, normalize=True, max_length=256)
    found = embedder.embed([row["text"] for row in single])
    assert len(single) == 11
    assert np.abs(found - stored[[row["row"] for row in single]]).max() < ABSOLUTE["minilm_embeddings"]


def test_files_in_order(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines (CRLF, an empty one, no line end at the end), JSON lines and Parquet; parts smaller than the files."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedding, "_TEXTS_AT_ONCE", 2)
    Path("x.txt").write_bytes("\r\n".join(TEXTS).encode())
    Path("x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    parquet.write_table(pyarrow.table({"text": TEXTS}), "x.parquet")
    expected = Embedder.from_pretrained(folder).embed(TEXTS)
    names = ["x.txt", "x.jsonl", "x.parquet"]
    assert main.main(["embed", str(folder), *names, "-o", "out.npy", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("out.npy: 18 x 16; 18 texts in ") and captured.err == ""
    found = np.load("out.npy", mmap_mode="r")
    assert np.abs(found - np.concatenate([expected] * 3)).max() < ABSOLUTE["minilm_embeddings"]
    assert main.main(["embed", str(folder), *names, "-o", "out.parquet"]) == 0
    column = parquet.read_table("out.parquet")["embedding"]
    assert np.array_equal(np.array(column.to_pylist(), np.float32), found)


def test_nothing_to_embed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    done = embed_files(Embedder.from_pretrained(folder), [tmp_path / "x.txt"], tmp_path / "out.npy")
    assert done.texts == 0 and done.bytes_total == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 16)


def test_an_error_leaves_the_old_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_bytes(b"a\nshort\nte\xffxt\n")
    (tmp_path / "out.npy").write_text("old")
    assert main.main(["embed", str(folder), str(tmp_path / "x.txt"), "-o", str(tmp_path / "out.npy")]) == 1
    assert "not UTF-8: byte 10 (line 3)" in capsys.readouterr().err
    assert (tmp_path / "out.npy").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "x.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt", "-o", "out.csv"], "output: expected a name that ends in .npy or .parquet, got out.csv"),
        (["none.txt", "-o", "out.npy"], "No such file or directory: 'none.txt'"),
        (["x.txt", "-o", "out.npy", "--max-length", "33"], "max_length: expected 2 to 32 (positions of the model)"),
        (["x.txt", "-o", "none/out.npy"], "No such file or directory"),
        (["x.txt", "-o", "out.npy", "--device", "nonsense"], "--device: 'nonsense' cannot be used"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("a")
    assert main.main(["embed", str(folder), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast embed: ") and message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_an_encoder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from bert_fast.errors import CheckpointError

    model = BertModel(BertConfig.from_pretrained(folder))
    model.save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(key for key in weights if "encoder.layer.1.output.dense.weight" in key)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: encoder\.layer\.1"):
        Embedder.from_pretrained(tmp_path)
