"""The code points that docs/tokenizer.md lists are those of the measured differences."""

import re
from pathlib import Path

DOC = Path(__file__).resolve().parents[2] / "docs" / "tokenizer.md"


def documented() -> list[set[int]]:
    """The code points of each list, in the order of the page."""
    text = DOC.read_text(encoding="utf-8").split("## Where older Python tokenizers differ")[1]
    lists = []
    for block in re.findall(r"```text\n(.*?)\n```", text, flags=re.DOTALL):
        spans = [word.partition("-") for word in block.split()]
        lists.append({c for first, _, last in spans for c in range(int(first, 16), int(last or first, 16) + 1)})
    return lists


def measured(path: Path) -> set[int]:
    """The code points of a table of differences."""
    lines = path.read_text(encoding="utf-8").split("\n")[1:]
    return {int(line.split("\t")[0], 16) for line in lines if line}


def test_the_lists_are_complete_and_disjoint(shared_data: Path) -> None:
    lists = documented()
    lower = measured(shared_data / "fixtures" / "unicode" / "slow4_differences_lower.tsv")
    cased = measured(shared_data / "fixtures" / "unicode" / "slow4_differences_cased.tsv")
    assert [len(code_points) for code_points in lists] == [383, 104, 13, 256, 3, 1, 1002, 132]
    assert set().union(*lists[:6]) == lower
    assert set().union(*lists[6:]) == cased - lower
