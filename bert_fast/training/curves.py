"""The curves of a run as one picture, beside what transformers leaves of it."""

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

_NOT_DRAWN = ("runtime", "per_second", "epoch", "step", "flos", "learning_rate", "grad_norm")
NAME = "curves.png"


class CurvesCallback(TrainerCallback):
    """Draws `curves.png` into output_dir when a run ends; nothing without matplotlib."""

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See the class."""
        if state.is_world_process_zero:
            try:
                draw_curves(state.log_history, Path(args.output_dir) / NAME)
            except ImportError:
                return


def draw_curves(log_history: list[dict[str, float]], path: str | os.PathLike[str]) -> None:
    """Losses in one drawing, and every other figure of the evaluations in one of its own, over the steps.

    log_history: as `TrainerState` has it. Raises: ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[float, float]]] = {}
    for entry in log_history:
        for name, value in entry.items():
            if not any(part in name for part in _NOT_DRAWN) and name != "train_loss":
                curves.setdefault(name, []).append((entry["step"], value))
    losses = [name for name in curves if name in ("loss", "eval_loss")]
    panels = [losses] if losses else []
    panels += [[name] for name in curves if name not in losses]
    if not panels:
        return
    figure = Figure(figsize=(7, 2.6 * len(panels)), layout="constrained")
    for axes, names in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        for name in names:
            axes.plot(*zip(*curves[name], strict=True), label=name, marker="." if len(curves[name]) < 30 else None)
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
