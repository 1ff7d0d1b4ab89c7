"""`bert-fast embed`, and the Python under it."""

import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM, BertModel, BertTokenizer
from bert_fast.cli import main
from bert_fast.models.pooling import Pooling
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes import embedding_files, unfinished
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.embedding_files import Embedded, embed_files
from bert_fast.training.recipes.unfinished import UnfinishedVectors
from tests.process_server import Finished, run

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
def test_vectors_are_those_of_texts_alone(folder: Path, pooling: Pooling) -> None:
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
    monkeypatch.setattr(embedding_files, "_GROUP_TEXTS", 2)
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
    assert main.main(["embed", str(folder), *names, "-o", "out.arrow"]) == 0
    with pyarrow.OSFile("out.arrow") as file:
        column = pyarrow.ipc.open_file(file).read_all()["embedding"]
    assert np.array_equal(np.array(column.to_pylist(), np.float32), found)
    info = json.loads(Path("out.arrow.json").read_text())
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (info["weights_sha256"], info["dimension"], info["count"], info["max_length"]) == (weights, 16, 18, 32)
    assert sorted(path.suffix for path in Path().iterdir()) == sorted(
        [".json"] * 3 + [".npy", ".arrow", ".txt", ".jsonl"] + [".parquet"] * 2
    )


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
        (["x.txt", "-o", "out.csv"], "output: expected a name that ends in .npy, .parquet or .arrow, got out.csv"),
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


def embed_until(at: str, how: str, arguments: list[str]) -> None:
    """The command with groups of three texts, each recorded. The process stops itself, by SIGKILL or SIGINT, when it is
    asked for the `at`-th time for vectors, or, "finish" and the like, when it is about to call that function, or,
    "torn", with half of a group's vectors written.
    """
    torch.set_num_threads(1)
    embedding_files._GROUP_TEXTS, embedding_files._RECORD_SECONDS = 3, 0.0
    number = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[how]
    embed_tokens, add, calls = Embedder.embed_tokens, UnfinishedVectors.add, itertools.count(1)

    def stop() -> None:
        os.kill(os.getpid(), number)

    def counted(embedder: Embedder, ragged: Any) -> Any:
        if at == str(next(calls)):
            stop()
        return embed_tokens(embedder, ragged)

    def torn(one: UnfinishedVectors, vectors: Any, *others: Any) -> None:
        if one.texts >= 6:
            one._file.write(vectors.tobytes()[: vectors.nbytes // 2 + 1])
            one._file.flush()
            stop()
        add(one, vectors, *others)

    def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*others: Any) -> Any:
            stop()
            return call(*others)

        return stopped

    Embedder.embed_tokens = counted  # type: ignore[method-assign]
    if at == "torn":
        UnfinishedVectors.add = torn  # type: ignore[method-assign]
    if at in ("finish", "remove"):
        setattr(UnfinishedVectors, at, stopping(getattr(UnfinishedVectors, at)))
    if at == "write_info":
        embedding_files.write_info = stopping(embedding_files.write_info)
    if at == "record":
        unfinished.write_atomically = stopping(unfinished.write_atomically)
    sys.exit(main.main(arguments))


def run_until(folder: Path, at: str, how: str, *arguments: str) -> Finished:
    """In a process of its own, whose output is kept beside the working directory."""
    command = ["embed", str(folder), "x.txt", "--quiet", *arguments]
    return run(embed_until, at, how, command, folder=folder)


def write_texts(count: int) -> list[str]:
    texts = ["a short text . " * (index * 7 % 5) + "é" * (index % 3) for index in range(count)]
    Path("x.txt").write_text("".join(f"{text}\n" for text in texts))
    return texts


@pytest.mark.parametrize("ending", ["npy", "parquet", "arrow"])
def test_killed_and_resumed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """At the first group and at later ones, in the middle of a write, at each step of the end: the bytes are those of
    one run, and vectors those of the texts.
    """
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    texts = write_texts(20)
    whole, output = f"whole.{ending}", f"out.{ending}"
    assert run_until(folder, "", "kill", "-o", whole).returncode == 0
    ends = {
        "npy": ["1", "3", "torn", "record", "write_info", "remove"],
        "parquet": ["2", "torn", "4", "finish"],
        "arrow": ["7", "remove"],
    }
    for at in ends[ending]:
        assert run_until(folder, at, "kill", "-o", output, "--resume").returncode == -signal.SIGKILL
        assert Path(f"{output}.partial").is_dir()
    done = run_until(folder, "", "kill", "-o", output, "--resume")
    assert done.returncode == 0, done.stderr
    assert Path(output).read_bytes() == Path(whole).read_bytes()
    assert Path(f"{output}.json").read_bytes() == Path(f"{whole}.json").read_bytes()
    assert not list(Path().glob("*.partial"))
    if ending == "npy":
        expected = Embedder.from_pretrained(folder).embed(texts)
        assert np.abs(np.load(output) - expected).max() < ABSOLUTE["minilm_embeddings"]


def test_resume_computes_only_the_rest(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(20)
    assert run_until(folder, "4", "kill", "-o", "out.npy").returncode == -signal.SIGKILL
    reports: list[Embedded] = []
    monkeypatch.setattr(embedding_files, "_GROUP_TEXTS", 3)
    embedder = Embedder.from_pretrained(folder)
    with pytest.raises(ValueError, match="another pooling: expected 'mean', got 'cls'"):
        embed_files(Embedder.from_pretrained(folder, pooling="cls"), ["x.txt"], "out.npy", resume=True)
    embed_files(embedder, ["x.txt"], "out.npy", resume=True, report=reports.append)
    assert [now.texts for now in reports] == [9, 12, 15, 18, 20] and reports[-1].resumed_texts == 9
    assert reports[-1].tokens == len(embedder.tokenize(Path("x.txt").read_text().splitlines()).ids)


def test_interrupted_says_how_to_go_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(20)
    stopped = run_until(folder, "3", "interrupt", "-o", "out.npy")
    assert (stopped.returncode, stopped.stdout) == (130, "")
    kept = "6 texts are kept, the same command with --resume goes on behind them"
    assert stopped.stderr == f"bert-fast embed: interrupted; {kept}\n"
    assert run_until(folder, "1", "interrupt", "-o", "new.npy").stderr.endswith("no texts were finished\n")
    assert not Path("new.npy.partial").exists()


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("", ["--pooling", "max"], "was begun with another pooling: expected 'mean', got 'max'"),
        ("", ["--normalize"], "was begun with another normalize"),
        ("", ["--max-length", "8"], "was begun with another max_length: expected 32, got 8"),
        ("longer", [], "was begun with another files"),
        ("other", [], "expected the 6 texts that were embedded before, got others"),
        ("damaged", [], "is damaged"),
        ("short", [], "vectors.npy: expected at least"),
    ],
)
def test_other_settings_or_inputs_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    change: str, arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_texts(20)
    monkeypatch.setattr(embedding_files, "_GROUP_TEXTS", 3)

    def stop(now: Embedded) -> None:
        if now.texts == 6:
            raise KeyboardInterrupt

    embedder = Embedder.from_pretrained(folder)
    with pytest.raises(KeyboardInterrupt):
        embed_files(embedder, ["x.txt"], "out.npy", report=stop)
    source, progress = Path("x.txt").read_bytes(), Path("out.npy.partial/progress.json")
    if change == "longer":
        Path("x.txt").write_bytes(source + b"a\n")
    elif change == "other":
        Path("x.txt").write_bytes(source.replace(b"short", b"texts", 1))
    elif change == "damaged":
        progress.write_text(progress.read_text().replace('"texts": 6', '"texts": 3'))
    elif change == "short":
        os.truncate("out.npy.partial/vectors.npy", 200)
    assert main.main(["embed", str(folder), "x.txt", "-o", "out.npy", "--resume", "--quiet", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("bert-fast embed: resume: ") and error.count("\n") == 1
    assert not Path("out.npy").exists()
    assert main.main(["embed", str(folder), "x.txt", "-o", "out.npy", "--quiet", *arguments]) == 0  # begins again
    assert len(np.load("out.npy")) == len(Path("x.txt").read_text().splitlines())


def test_groups_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_files, "_GROUP_TEXTS", 5)
    monkeypatch.setattr(embedding_files, "_GROUP_BYTES", 40)
    texts = ["x" * (index * 13 % 30) for index in range(57)]
    (tmp_path / "x.txt").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = []
    for block_bytes in (16, 100, 1 << 20):
        options = embedding_files.ReadOptions(block_bytes=block_bytes)
        sources = embedding_files.find_texts([tmp_path / "x.txt", tmp_path / "x.jsonl"], "auto", "text")
        groups = list(embedding_files.read_groups(sources, options))
        assert [group.text(place) for group in groups for place in range(len(group))] == texts * 2
        found.append([len(group) for group in groups])
    assert found[0] == found[1] == found[2] and max(found[0]) == 5 and min(found[0]) < 5
