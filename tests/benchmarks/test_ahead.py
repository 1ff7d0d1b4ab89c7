"""What is compiled ahead for a GPU is what a later run finds in Triton's cache, and nothing else is carried along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import ahead
from benchmarks.kit.record import ROOT

COMMAND = (sys.executable, "-m", "benchmarks.gpu.ahead", "--jobs", "1", "--families")


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


def test_a_family_that_there_is_not_is_named() -> None:
    with pytest.raises(SystemExit, match=r"--families: expected some of .*, got layernorm"):
        ahead.main(["--families", "layernorm"])


def test_a_chip_that_nobody_knows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ahead.main(["--device", "sm_91"])
    assert "invalid choice: 'sm_91'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has the real driver")
def test_a_later_run_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    said = subprocess.run([*COMMAND, "dropout"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kernels = int(said.stdout.split()[0])
    assert kernels > 0 and said.stdout.strip().endswith(str(tmp_path / "cache"))
    smoke = (sys.executable, "-m", "benchmarks.smoke", "--device", "sm_90", "--families", "dropout")
    smoke += ("--results", str(tmp_path), "--seconds", "300")
    subprocess.run(smoke, cwd=ROOT, env=environment, capture_output=True, check=True)
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    compiled = [one for line in lines for one in line["compiled"]]
    assert compiled
    cubins = list((tmp_path / "cache").glob("*/*.cubin"))
    assert len(cubins) == kernels, "the smoke run has compiled a kernel of its own"
