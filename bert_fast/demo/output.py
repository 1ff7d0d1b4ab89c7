"""The demo's folder: what it writes there, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

from bert_fast.demo.requirements import DemoError
from bert_fast.files import write_atomically

__all__ = ["OutputFolder"]

_MADE_BY = "bert-fast demo"


class OutputFolder:
    """A folder with report.html, results.json and checkpoint/; other files in it are not touched.

    Things of these names that are there already are replaced only if results.json says that an earlier demo made them.

    Args:
        path: made if missing.
    """

    REPORT, RESULTS, CHECKPOINT = "report.html", "results.json", "checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.path / self.REPORT

    @property
    def checkpoint(self) -> Path:
        """The directory of the trained model."""
        return self.path / self.CHECKPOINT

    def claim(self) -> None:
        """Makes the folder ours, before any work is done.

        Raises:
            DemoError: it holds something of the names above that no demo made, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = [name for name in (self.REPORT, self.RESULTS, self.CHECKPOINT) if (self.path / name).exists()]
            if foreign and not self._is_ours():
                raise DemoError(
                    f"{self.path} holds {', '.join(foreign)}, which this command did not make; "
                    "move it away or choose another folder by --output"
                )
            self.write_results({"finished": False})
        except OSError as error:
            raise DemoError(f"--output: {self.path} cannot be written: {error}") from error

    def write_report(self, page: str) -> None:
        """Replaces report.html, atomically."""
        write_atomically(self.report, lambda temporary: temporary.write_text(page, encoding="utf-8"))

    def write_results(self, results: dict[str, Any]) -> None:
        """Replaces results.json, atomically."""
        text = json.dumps({"made_by": _MADE_BY, **results}, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.path / self.RESULTS, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def _is_ours(self) -> bool:
        try:
            stored = json.loads((self.path / self.RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(stored, dict) and stored.get("made_by") == _MADE_BY
