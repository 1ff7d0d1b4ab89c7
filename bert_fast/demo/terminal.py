"""The demo on the terminal: headings, progress, results as they come, the table at the end."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert_fast.demo.progress import Advance
from bert_fast.demo.results import DemoResults
from bert_fast.demo.search import Answer
from bert_fast.terminal import Part, StatusLine

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Terminal", "excerpt"]

EXCERPT_CHARS = 150


@dataclass(frozen=True)
class Terminal:
    """Writes to a rich console. Text from outside is never read as markup."""

    console: "Console"

    @contextlib.contextmanager
    def track(self, description: str, total: int) -> Iterator[Advance]:
        """A line that says how far it is; it disappears when the work is done."""
        line, done = StatusLine(self.console.file, is_transient=True), itertools.count(1)

        def advance() -> None:
            number = next(done)
            line.show([Part(f"{description} {number}/{total}", 0)], number / total)

        with contextlib.closing(line):
            line.open(f"{description} 0/{total}", is_patient=True)
            yield advance

    def heading(self, number: int, text: str) -> None:
        """The title of a step."""
        from rich.text import Text

        self.console.print()
        self.console.print(Text(f"{number}. {text}", style="bold"))

    def line(self, text: str) -> None:
        """A result."""
        self.console.print(f"  {text}", markup=False, highlight=True)

    def answers(self, answers: Sequence[Answer]) -> None:
        """Questions with their passages."""
        from rich.padding import Padding
        from rich.text import Text

        for answer in answers:
            self.console.print(Text(f"  {answer.question}", style="cyan"))
            for hit in answer.hits:
                found = Text.assemble((f"{hit.score:.2f}  {hit.passage.heading}: ", "bold"), excerpt(hit.passage.text))
                self.console.print(Padding(found, (0, 0, 0, 4)))

    def summary(self, results: DemoResults) -> None:
        """The report's two tables."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, title="Measured", title_justify="left", title_style="bold", pad_edge=False)
        for name in ("", "bert_fast", "compared with", "", "ratio"):
            table.add_column(name, justify="right" if name in ("bert_fast", "ratio") else "left")
        table.columns[3].justify = "right"
        for row in results.rows:
            cells = (f"{row.what} ({row.unit})", row.ours, row.peer, row.theirs, row.ratio)
            table.add_row(*(Text(cell) for cell in cells))
        checks = Table(box=box.SIMPLE_HEAD, title="Checked", title_justify="left", title_style="bold", pad_edge=False)
        for name in ("", "found", "expected", ""):
            checks.add_column(name)
        for check in results.checks:
            mark = Text("ok", style="green") if check.passed else Text("FAILED", style="bold red")
            checks.add_row(Text(check.name), Text(check.found), Text(check.expected), mark)
        self.console.print()
        self.console.print(table)
        self.console.print(checks)


def excerpt(text: str) -> str:
    """The beginning of a passage on one line."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARS else line[:EXCERPT_CHARS].rsplit(" ", 1)[0] + " …"
