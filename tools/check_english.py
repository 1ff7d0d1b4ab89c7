"""Checks the prose of every page: lines of at most 100 columns, and no words that a reader has to read twice.

    .venv/bin/python tools/check_english.py

Tables, code and links may be longer. `WORDS` is small on purpose: each entry says what to write instead.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100

# Pattern -> what to write instead.
WORDS = {
    r"\b(nobody|somebody|whoever|who asks)\b": "name the subject: the caller, another thread, no module",
    r"\blest\b": "so that ... does not",
    r"\bat a stroke\b": "at once",
    r"\blooked at, and left\b": "what was tried and dropped belongs in a decision",
    r"\btakes? 0?\.\d+ of (the )?time\b": "speed is a factor: 1.6 times as fast",
    r"\b(the|our) goal\b|\bmissed\b": "goals belong in CONTRIBUTING or the pages of benchmarks",
}
# Pages where goals belong.
OF_BENCHMARKS = ("CONTRIBUTING.md", "docs/results.md", "docs/benchmarks.md", "docs/glossary.md")
WIDE = ("docs/api.md",)  # made from docstrings
_NOT_PROSE = re.compile(r"^```.*?^```|^<!-- table: .*?^<!-- end of table -->|^<!-- .*? -->$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return [path for pattern in ("*.md", "docs/**/*.md", "examples/*.md") for path in sorted(ROOT.glob(pattern))]


def problems(name: str, text: str) -> Iterator[str]:
    """What is wrong on a page, a line each with its number."""
    prose = _NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), start=1):
        is_link = re.match(r"[-*\s]*\[[^\]]*\]\(\S+\)\S*$", line)
        if len(line) > COLUMNS and not name.startswith(WIDE) and not line.startswith("|") and not is_link:
            yield f"{name}:{number}: {len(line)} columns, expected at most {COLUMNS}"
    flat = " ".join(prose.split())
    for pattern, instead in WORDS.items():
        if name in OF_BENCHMARKS and "goal" in pattern:
            continue
        for found in re.finditer(pattern, flat, re.IGNORECASE):
            yield f"{name}: {found[0]!r}: {instead}"


def main() -> int:
    found = [
        problem
        for page in pages()
        for problem in problems(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))
    ]
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(pages())} pages, {len(found)} problems of English")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
