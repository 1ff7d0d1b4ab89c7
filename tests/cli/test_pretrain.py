"""`bert-fast pretrain`, and runs that are interrupted or shared by processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bert_fast import BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from bert_fast.cli import main
from bert_fast.data import tokenize_files
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.txt and valid.txt: documents of sentences, one a line."""
    path = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for name, count in (("train.txt", 30), ("valid.txt", 5)):
        documents = []
        for _ in range(count):
            people = [(draw.choice(["John", "Mary"]), draw.choice(["Oslo", "Paris"])) for _ in range(12)]
            documents.append("".join(f"{who} lives in {where} .\n" for who, where in people))
        (path / name).write_text("\n".join(documents))
    return path


def arguments(model: Path | str, corpus: Path, output: Path, *more: str) -> list[str]:
    texts = ["--train", str(corpus / "train.txt"), "--valid", str(corpus / "valid.txt")]
    return ["pretrain", "--model", str(model), *texts, "--output-dir", str(output), "--batch-tokens", "512", *more]


def test_two_phases(tiny_model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "8", "--max-length", "24", "--long-length", "48", "--long-share", "0.25", "--quiet")
    command = arguments(tiny_model, corpus, tmp_path / "run", *options)
    assert main.main(command) == 0
    first, second = tmp_path / "run" / "length-24", tmp_path / "run" / "length-48"
    assert "finished after 2 steps; " in capsys.readouterr().out
    for path, steps, length in ((first, 6, 24), (second, 2, 48)):
        plan = json.loads((path / "run.json").read_text())["plan"]
        assert (plan["steps"], plan["config"]["max_length"], plan["model"]) == (steps, length, "BertForPreTraining")
        assert (path / "predictions").is_dir()
    assert json.loads((second / "run.json").read_text())["plan"]["config"]["model"] == str(first / "model")
    model = BertForPreTraining.from_pretrained(second / "model")
    assert model.config.max_position_embeddings == 128
    # The same command has nothing left to do, but for what is lost; then it does the same again.
    before = (second / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(second)
    assert main.main([*command, "--resume", "must"]) == 0
    assert (second / "model" / "model.safetensors").read_bytes() == before
    assert main.main([*command, "--resume", "never"]) == 1
    capsys.readouterr()
    assert main.main(["evaluate", str(second), str(tmp_path / "run" / "tokens" / "valid"), "--json"]) == 0
    from_store = json.loads(capsys.readouterr().out)
    assert main.main(["evaluate", str(second), str(corpus / "valid.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == from_store
    assert main.main(["predict", str(second), str(corpus / "valid.txt")]) == 1
    assert "a pre-trained model says nothing of examples" in capsys.readouterr().err


def test_random_weights_from_a_configuration_and_a_store(
    tiny_model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = BertTokenizer.from_pretrained(tiny_model)
    tokenize_files([corpus / "train.txt"], tmp_path / "store", tokenizer)
    config = BertConfig.from_pretrained(tiny_model)
    (tmp_path / "config.json").write_text(config.to_json_string())
    command = [
        *("pretrain", "--model", str(tmp_path / "config.json"), "--tokenizer", str(tiny_model)),
        *("--train", str(tmp_path / "store"), "--output-dir", str(tmp_path / "run"), "--quiet"),
        *("--epochs", "0.5", "--batch-size", "8", "--max-length", "32", "--no-next-sentence", "--whole-words"),
    ]
    assert main.main(command) == 0
    ended = capsys.readouterr().out
    assert ended.startswith(f"{tmp_path / 'run'}: finished after ") and f" steps; model in {tmp_path / 'run'}" in ended
    BertForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert not (tmp_path / "run" / "tokens" / "train").exists()
    assert not (tmp_path / "run" / "predictions").exists()


def test_dry_run(tiny_model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--tokenizer",
        str(tiny_model),
        "--steps",
        "100",
        "--max-length",
        "32",
        "--long-length",
        "64",
        "--dry-run",
    )
    assert main.main(arguments("tiny", corpus, tmp_path / "run", *options)) == 0
    out = capsys.readouterr().out
    assert "BertForPreTraining of 2 layers of 128" in out and "steps        90; " in out
    assert "then         10 steps with max_length 64" in out
    assert "first batch  " in out and "[MASK:" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "huge"],
            "model: expected one of tiny, mini, small, medium, base, large, a config.json or a checkpoint",
        ),
        (["--long-length", "999", "--long-share", "0.5"], "expected at most the model's 128 positions, got 999"),
        (["--long-share", "0.01", "--long-length", "130"], "long_share: 0.01 of 4 steps leaves a phase without any"),
        (["--train", "none.txt"], "No such file or directory: 'none.txt'"),
        (["--train", "store", "store"], "train, valid: expected text files, or one token store"),
        (["--train", "one.txt"], "next-sentence prediction needs at least 2 documents"),
        (
            ["--output-dir", "half", "--long-length", "130", "--long-share", "0.5"],
            "output_dir: half/length-130 cannot be made or written: half/length-130 is no directory",
        ),
        (["--cased"], "cased: goes with a vocab.txt"),
        (["--tokenizer", "vocab.txt"], "tokenizer: expected at most the model's vocab_size=27 tokens, got 40"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    options: list[str],
    message: str,
    tiny_model: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("store").mkdir()
    Path("half").mkdir()
    Path("half", "length-130").write_text("")
    Path("one.txt").write_text("John lives in Oslo .\nMary ran .\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(35))]
    Path("vocab.txt").write_text("\n".join(words))
    command = arguments(tiny_model, corpus, Path("run"), "--steps", "4", "--quiet", "--tokenizer", str(tiny_model))
    assert main.main([*command, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast pretrain: ") and message in error and error.count("\n") == 1


def test_a_file_without_text_is_not_in_the_way_of_another(
    tiny_model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, not what became of it; its empty store is gone."""
    (tmp_path / "blank.txt").write_text("\n \n")
    command = arguments(tiny_model, corpus, tmp_path / "run", "--train", str(tmp_path / "blank.txt"), "--steps", "1")
    assert main.main(command) == 1
    expected = f"bert-fast pretrain: {tmp_path / 'blank.txt'}: expected text, got none that makes tokens\n"
    assert capsys.readouterr().err == expected
    assert not list((tmp_path / "run" / "tokens").iterdir())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_with_a_checkpoint_and_the_same_command_goes_on(
    number: signal.Signals, status: int, tiny_model: Path, corpus: Path, tmp_path: Path
) -> None:
    """The result is that of a run that nobody interrupted, bit for bit."""
    options = ("--steps", "60", "--max-length", "24", "--log-every", "1", "--eval-every", "60", "--save-every", "60")
    command = arguments(tiny_model, corpus, tmp_path / "run", *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "bert_fast", *command], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    assert f"interrupted: {number.name} after ".encode() in out and b"Traceback" not in err
    assert not (tmp_path / "run" / "model").exists()
    if number == signal.SIGINT:
        return
    assert main.main([*command, "--quiet", "--resume", "must"]) == 0
    assert main.main(arguments(tiny_model, corpus, tmp_path / "whole", *options, "--quiet")) == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_torchrun(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    """Two processes by torchrun; only the first talks, and they compute what one does with twice the accumulation."""
    options = ("--steps", "4", "--max-length", "24")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = arguments(tiny_model, corpus, tmp_path / "two", *options)
    done = subprocess.run(
        [*launcher, "-m", "bert_fast.cli.main", *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 4 steps") == 1
    assert done.stderr.count("finished at step 4 of 4") == 1
    plan = json.loads((tmp_path / "two" / "run.json").read_text())["plan"]
    assert plan["num_processes"] == 2
    alone = arguments(tiny_model, corpus, tmp_path / "one", *options, "--gradient-accumulation", "2", "--quiet")
    assert main.main(alone) == 0
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    start = load_file(tiny_model / "model.safetensors")
    for name in start:  # sums in another order: far less than what training changed
        if name in one:
            assert (one[name] - two[name]).norm() < (one[name] - start[name]).norm() / 100
