"""`bert-fast verify`: everything with digests is found, read and judged."""

import json
import shutil
from pathlib import Path

import pytest

from bert_fast.cli.main import main

pytest.importorskip("accelerate")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_run_and_a_store(
    classify_run: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(classify_run, tmp_path / "run")
    (tmp_path / "x.txt").write_text("the film was good .\n" * 50)
    store = tmp_path / "store"
    assert main(["tokenize", str(tmp_path / "x.txt"), "-o", str(store), "--tokenizer", str(tiny_model), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["verify", str(run), str(store)]) == 0
    out = capsys.readouterr().out.splitlines()
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert out == [f"{path}: as it was written" for path in [*checkpoints, store]]

    flip(checkpoints[0] / "optimizer.pt")
    flip(store / "tokens.bin")
    assert main(["verify", str(run), str(store), str(tmp_path / "none")]) == 1
    found = capsys.readouterr()
    assert found.out.splitlines() == [f"{path}: as it was written" for path in checkpoints[1:]]
    first, second, third = found.err.splitlines()
    assert first.startswith(f"bert-fast verify: {checkpoints[0]}/optimizer.pt: is damaged: expected digest ")
    assert second.startswith(f"bert-fast verify: {store}/tokens.bin: is damaged from byte 0 on")
    assert third == f"bert-fast verify: {tmp_path}/none: holds no token store and no checkpoint"


def test_without_digests_nothing_is_claimed(
    classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(classify_run, tmp_path / "run")
    checkpoint = min((run / "checkpoints").iterdir())
    state = json.loads((checkpoint / "state.json").read_text())
    del state["digests"], state["digest"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert main(["verify", str(checkpoint)]) == 0
    assert capsys.readouterr().out == f"{checkpoint}: has no digests: nothing is known of it\n"


def test_a_damaged_checkpoint_is_not_predicted_with(
    classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(classify_run, tmp_path / "run")
    checkpoint = min((run / "checkpoints").iterdir())
    (tmp_path / "x.tsv").write_text("sentence\tlabel\na good film\tpositive\n")
    assert main(["predict", str(checkpoint), str(tmp_path / "x.tsv")]) == 0
    flip(checkpoint / "model.safetensors")
    assert main(["predict", str(checkpoint), str(tmp_path / "x.tsv")]) == 1
    assert "model.safetensors: is damaged: expected digest" in capsys.readouterr().err
