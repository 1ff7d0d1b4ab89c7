"""`Listener`: the base of observers that care for some of what a run tells."""

from pathlib import Path

from bert_fast.training.events import Evaluation, Plan, Step

__all__ = ["Listener"]


class Listener:
    """An `events.Observer` that hears everything and does nothing."""

    def start(self, plan: Plan) -> None:
        """Before the first step."""

    def step(self, step: Step) -> None:
        """After some steps."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation."""

    def checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was written."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def end(self, outcome: str) -> None:
        """After the last step."""
