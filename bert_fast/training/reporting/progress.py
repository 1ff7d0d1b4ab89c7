"""How far a run is, on one line of the terminal; evaluations and notes stay above it."""

import importlib.util
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from bert_fast.terminal import printable
from bert_fast.training.observers import Evaluation, Observer, Plan, Step
from bert_fast.training.reporting.flops import model_flops_utilisation
from bert_fast.training.reporting.formatting import count, duration, losses, memory, number, percent, rate

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["ProgressLine"]

_LINE_SECONDS = 10.0  # between lines where nothing can be drawn over
_WINDOW = 50  # reports that the time left is estimated from
_BAR = 20  # columns
_BETWEEN = "  "


@dataclass(frozen=True)
class _Part:
    """A piece of the line; of those that do not fit, the one of the greatest rank goes first."""

    text: str
    rank: int
    style: str = ""


class ProgressLine(Observer):
    """Writes to the terminal: one line that is drawn over, with rich; elsewhere, or without rich, a line now and then.

    Args:
        stream: default stderr.
        clock: seconds, from any beginning.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._plan: Plan | None = None
        self._live: Live | None = None
        self._began = self._last_line = 0.0
        self._step, self._steps = 0, 1
        self._best: Evaluation | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def start(self, plan: Plan) -> None:
        """Says what is going to happen."""
        self._plan, self._step, self._steps, self._best = plan, plan.first_step, max(plan.steps, 1), None
        self._began, self._last_line = self._clock(), float("-inf")
        self._marks.clear()
        self._marks.append((plan.first_step, self._began))
        self._say(
            f"{plan.task}: {plan.model}, {count(plan.num_parameters)} parameters, on {_devices(plan)}, "
            f"{plan.config.get('precision', 'fp32')}",
            "bold",
        )
        self._say(
            f"{plan.num_examples:,} examples, {plan.num_valid_examples:,} for validation; {plan.steps:,} steps, "
            f"{plan.steps_per_epoch:,} an epoch; everything goes to {plan.output_dir}"
        )
        if self._stream.isatty() and not _is_installed("rich"):
            self._say("(a line that is drawn over comes with rich: pip install bert_fast[train])")
        if self._is_terminal():
            self._live = self._new_live()
            self._live.update(f"step {plan.first_step:,}/{plan.steps:,}", refresh=True)

    def step(self, step: Step) -> None:
        """Draws the line anew."""
        now = self._clock()
        self._step = step.step
        self._marks.append((step.step, now))
        parts = self._parts(step)
        if self._live is not None:
            self._live.update(self._drawn(parts, step), refresh=True)
        elif now - self._last_line >= _LINE_SECONDS or step.step == self._steps:
            self._last_line = now
            self._write(_BETWEEN.join(part.text for part in parts))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Says what came out, the metric that counts first."""
        plan = self._plan
        assert plan is not None
        if evaluation.is_best:
            self._best = evaluation
        names = [name for name in evaluation.metrics if name != "unigram_entropy"]  # the same every time
        names.sort(key=lambda name: (name != plan.metric, name != "loss"))
        shown = ", ".join(f"{name} {number(evaluation.metrics[name])}" for name in names)
        best = ", the best so far" if evaluation.is_best else ""
        self._say(f"step {evaluation.step:,}: {shown}{best}", "green" if evaluation.is_best else "cyan")

    def note(self, text: str) -> None:
        """Says it."""
        self._say(text, "yellow")

    def end(self, outcome: str) -> None:
        """Says how it ended."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        plan, self._plan = self._plan, None
        if plan is None:  # refused before its start: who asked for it is told by the error
            return
        done = f"{outcome} at step {self._step:,} of {plan.steps:,}, after {duration(self._clock() - self._began)}"
        if self._best is not None and plan.metric in self._best.metrics:
            done += f"; best {plan.metric} {number(self._best.metrics[plan.metric])} at step {self._best.step:,}"
        self._say(done, "bold")

    def _parts(self, step: Step) -> list[_Part]:
        """The line's pieces, from left to right."""
        assert self._plan is not None
        share = step.step / self._steps
        total, in_parts = losses(step.losses)
        parts = [
            _Part(f"step {step.step:,}/{self._steps:,}", 0, "bold"),
            _Part(f"{100 * share:.0f} %", 3),
            _Part(f"epoch {step.epoch:.2f}", 7),
            _Part(total, 1, "green"),
        ]
        if in_parts:
            parts.append(_Part(in_parts, 6))
        if step.seconds > 0:
            parts.append(_Part(rate(step.tokens / step.seconds), 2, "cyan"))
        mfu = model_flops_utilisation(self._plan, step)
        if mfu is not None:
            parts.append(_Part(f"MFU {percent(mfu)}", 5, "cyan"))
        if step.seconds > 0 and step.wait_seconds > 0.1 * step.seconds:
            parts.append(_Part(f"{percent(step.wait_seconds / step.seconds)} waiting for data", 5, "yellow"))
        left = self._seconds_left(step)
        if left is not None:
            parts.append(_Part(f"{duration(left)} left", 4))
        parts.append(_Part(memory(step.memory_bytes), 8))
        return parts

    def _seconds_left(self, step: Step) -> float | None:
        """At the pace of the last reports, evaluations and checkpoints among them."""
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if step.step >= self._steps or last == first:
            return None
        return (self._steps - last) * (now - then) / (last - first)

    def _drawn(self, parts: Sequence[_Part], step: Step) -> "Text":
        """What rich draws: as many pieces as fit, and a bar where there is room left."""
        from rich.text import Text

        width = self._live.console.width if self._live is not None else 80
        kept = list(parts)
        while len(kept) > 1 and len(_BETWEEN.join(part.text for part in kept)) >= width:
            kept.remove(max(kept, key=lambda part: part.rank))
        line = Text(no_wrap=True, overflow="crop")
        if len(_BETWEEN.join(part.text for part in kept)) + _BAR + len(_BETWEEN) < width:
            full = round(_BAR * step.step / self._steps)
            line.append("━" * full, "green")
            line.append("─" * (_BAR - full), "bright_black")
            line.append(_BETWEEN)
        for place, part in enumerate(kept):
            line.append((_BETWEEN if place else "") + part.text, part.style)
        return line

    def _is_terminal(self) -> bool:
        if not self._stream.isatty() or not _is_installed("rich"):
            return False
        from rich.console import Console

        return not Console(file=self._stream).is_dumb_terminal

    def _new_live(self) -> "Live":
        from rich.console import Console
        from rich.live import Live

        # Without a thread of its own: drawn when something is known. What others print appears above the line.
        live = Live(console=Console(file=self._stream), auto_refresh=False)
        live.start()
        return live

    def _say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        if self._live is None and not (style and self._is_terminal()):
            self._write(text)
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=self._stream) if self._live is None else self._live.console
        console.print(Text(printable(text), style))

    def _write(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


def _devices(plan: Plan) -> str:
    return plan.device if plan.num_processes == 1 else f"{plan.num_processes} processes, {plan.device} each"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
