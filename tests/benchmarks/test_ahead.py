"""What is compiled ahead for a GPU is what a later run finds in Triton's cache, and nothing else is carried along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.families import family_names
from benchmarks.gemm_tuning import timing
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ahead
from benchmarks.gpu.run import Run
from benchmarks.kit.results import ROOT


def test_only_what_is_loaded_stays(tmp_path: Path) -> None:
    kernel, launcher = tmp_path / "KERNEL", tmp_path / "LAUNCHER"
    for folder, names in (
        (kernel, ("a.cubin", "a.json", "__grp__a.json", "a.ptx", "a.llir", "a.ttgir", "a.source")),
        (launcher, ("launcher.so", "launcher.json")),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("1234")
    assert ahead.prune(tmp_path) == (1, 12)
    assert sorted(path.name for path in kernel.iterdir()) == ["__grp__a.json", "a.cubin", "a.json"]
    assert not launcher.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--parts", "ahead", "--device", "sm_91"), "invalid choice: 'sm_91'"),
        (("--parts", "ahead"), "--device: expected a null driver"),
        (("--parts", "steps", "--device", "sm_90"), "--device: expected a null driver"),
        (("--parts", "steps", "--only-red", "x"), "--only-red: expected part smoke"),
    ],
)
def test_what_does_not_go_together_is_named(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(list(options))
    assert said in capsys.readouterr().err


def test_of_all_families_all_else_is_compiled_too() -> None:
    assert ahead.in_order(["dropout", "attention"]) == ["attention", "dropout"]
    assert ahead.in_order(family_names())[-len(ahead.OTHERS) :] == list(ahead.OTHERS)


def test_on_a_gpu_its_own_tiles_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the device at hand, which says what it is."""
    asked = []
    monkeypatch.setattr(timing, "preparations", lambda device: asked.append(device) or [])
    assert not list(ahead.calls("tuned", Run("", {}, "cuda"))) and asked == [torch.device("cuda")]
    assert not list(ahead.calls("tuned", Run("", {}, "cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has the real driver")
def test_a_later_run_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "sm_90", "--families", "dropout", "--minutes", "10"]
    command += ["--results", str(tmp_path), "--parts"]
    said = subprocess.run([*command, "ahead"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    last = said.stdout.splitlines()[-1]
    kernels = int(last.split()[0])
    assert kernels > 0 and last.endswith(str(tmp_path / "cache"))
    subprocess.run([*command, "smoke"], cwd=ROOT, env=environment, capture_output=True, check=True)
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert [one for line in lines for one in line.get("compiled", ())]
    cubins = list((tmp_path / "cache").glob("*/*.cubin"))
    assert len(cubins) == kernels, "the smoke run has compiled a kernel of its own"
