"""A disk that is full: one line that names the folder, and the same command goes on when there is room again."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

from bert_fast.cli import main
from bert_fast.training import last_checkpoint
from tests.cli.conftest import error_of, finetune

CHECKPOINT_KIB = 250  # a checkpoint of `tiny_model` takes less


def command(model: Path, reviews: Path, output: Path) -> list[str]:
    return finetune(
        "classify", model, reviews / "train.tsv", output, save_strategy="steps", save_steps=1, max_steps=3
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole")
    assert main.main(command(tiny_model, reviews, path / "run")) == 0
    return (path / "run" / "model.safetensors").read_bytes()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system in memory below `folder`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"nothing can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full(
    uninterrupted: bytes, tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever file meets its end: weights, the optimizer's state, small files."""
    disk = tmp_path / "disk"
    with small_disk(disk):
        for free_kib in (8, 40, 100, CHECKPOINT_KIB + 8, 2 * CHECKPOINT_KIB):
            run = disk / str(free_kib)
            total = os.statvfs(disk)
            with open(disk / "filler", "wb") as filler:
                filler.write(bytes(total.f_bavail * total.f_frsize - free_kib * 1024))
            capsys.readouterr()
            assert main.main(command(tiny_model, reviews, run)) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith("bert-fast finetune: ") and str(run) in last and len(last) < 500, last
            assert not (run / "model.safetensors").exists()
            kept = last_checkpoint(run)
            if kept is not None:
                assert json.loads(Path(kept, "trainer_state.json").read_text())["global_step"] == int(kept[-1])
            (disk / "filler").unlink()
            assert main.main(command(tiny_model, reviews, run)) == 0
            assert (run / "model.safetensors").read_bytes() == uninterrupted
            subprocess.run(["rm", "-r", str(run)], check=True)


def test_errors_of_every_writer(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says it in a way of its own; none leaves a checkpoint that counts."""
    full = OSError(28, "No space left on device")
    at_end = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0: x")
    within = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    of_weights = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")
    cases = [
        ("torch.save", full), ("torch.save", at_end), ("torch.save", within),
        ("bert_fast.models.checkpoint_writer.save_file", of_weights),
        ("bert_fast.training.Trainer.save_model", of_weights), ("transformers.TrainerState.save_to_json", full),
    ]  # fmt: skip
    for number, (place, error) in enumerate(cases):

        def fail(*arguments: Any, error: Exception = error, **options: Any) -> None:
            raise error

        run = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            assert str(run) in error_of(command(tiny_model, reviews, run), capsys)
        assert last_checkpoint(run) is None and not (run / "model.safetensors").exists()


def test_answers_that_do_not_fit(
    runs: dict[str, Path], reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of before stays as it was."""
    disk = tmp_path / "disk"
    with small_disk(disk):
        (disk / "said").write_text("before")
        total = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(total.f_bavail * total.f_frsize - 4096))
        command = ["predict", str(runs["classify"]), str(reviews / "train.tsv"), "--max_seq_length", "40"]
        error = error_of([*command, "--output_file", str(disk / "said")], capsys)
        assert error == f"output_file: {disk / 'said'} cannot be written: No space left on device"
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "said"]
        assert (disk / "said").read_text() == "before"
