"""The picture of a run's curves: what is drawn, and when."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bert_fast.training.curves import NAME, CurvesCallback, draw_curves

HISTORY: list[dict[str, float]] = [
    {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5, "step": 1},
    {"eval_loss": 1.5, "eval_accuracy": 0.5, "eval_runtime": 1.0, "eval_steps_per_second": 3.0, "step": 2},
    {"loss": float("nan"), "step": 3},
    {"eval_loss": 1.0, "eval_accuracy": 0.75, "step": 4},
    {"train_runtime": 3.0, "train_loss": 1.2, "total_flos": 1.0, "step": 4},
]


def test_losses_together_and_other_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: dict[str, list[tuple[float, float]]] = {}
    panels: list[list[str]] = []

    def kept(self: Any, *arguments: Any, **options: Any) -> None:
        for axes in self.axes:
            panels.append([line.get_label() for line in axes.lines])
            drawn.update({line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.lines})
        save(self, *arguments, **options)

    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", kept)
    draw_curves(HISTORY, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert panels == [["loss", "eval_loss"], ["eval_accuracy"]]
    assert drawn["eval_loss"] == [(2, 1.5), (4, 1.0)] and drawn["eval_accuracy"] == [(2, 0.5), (4, 0.75)]
    assert drawn["loss"][0] == (1, 2.0) and len(drawn["loss"]) == 2


def test_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_curves([{"train_runtime": 3.0, "step": 1}], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_one_process_draws_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("bert_fast.training.curves.draw_curves", lambda history, path: drawn.append((history, path)))
    for is_first in (False, True):
        state = SimpleNamespace(is_world_process_zero=is_first, log_history=HISTORY)
        CurvesCallback().on_train_end(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert drawn == [(HISTORY, tmp_path / NAME)]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends as it does with it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    state = SimpleNamespace(is_world_process_zero=True, log_history=HISTORY)
    CurvesCallback().on_train_end(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ImportError):
        draw_curves(HISTORY, tmp_path / NAME)
