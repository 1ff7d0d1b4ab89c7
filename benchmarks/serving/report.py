"""What is stored, as the tables of docs/results.md, beside what it is meant to reach."""

from pathlib import Path
from typing import Any

from benchmarks.kit import markdown
from benchmarks.kit.results import RESULTS, read_lines

PATH = RESULTS / "serving.jsonl"
GOALS = {"as_they_come": 1.9, "sorted": 1.15, "one": 1.0}  # how many times as long the best of the others takes
Line = dict[str, Any]


def newest(kind: str, path: Path) -> list[Line]:
    """The newest line of every case and number of threads, in the order in which they were taken."""
    found: dict[tuple[str, int], Line] = {}
    for line in read_lines(path):
        if line.get("kind") == kind:
            key = line["case"], line["threads"]
            found.pop(key, None)
            found[key] = line
    return list(found.values())


def goal_of(case: str) -> float:
    """By the case's name, MiniLM/one_31."""
    name = case.rsplit("/", 1)[-1]
    return next(bound for begin, bound in GOALS.items() if name.startswith(begin))


def render_speed(path: Path = PATH) -> str:
    """A Markdown table: how many times as long others take as the faster of ours."""
    lines = newest("serving", path)
    names = [name for name in dict.fromkeys(name for line in lines for name in line["entrants"]) if not _is_own(name)]
    rows = []
    for line in lines:
        entrants, goal = line["entrants"], goal_of(line["case"])
        ours = [f"{entrants[name]['ms']:.1f}" for name in entrants if _is_own(name)]
        best = min(entry["bert_fast_ratio"] for name, entry in entrants.items() if not _is_own(name))
        ratios = [f"{entrants[name]['bert_fast_ratio']:.2f}" if name in entrants else "" for name in names]
        verdict = f"**{best:.2f}x** ({goal:.2f}x)" if best >= goal else f"{best:.2f}x, missed ({goal:.2f}x)"
        what = line["case"].removeprefix("serving/").replace("/", ", ")
        share = f"{line['share_of_peak']:.0%}"
        rows.append((what, str(line["threads"]), f"{line['fill']:.2f}", *ours, share, *ratios, verdict))
    header = ("model, case", "threads", "fill", "bert_fast, ms", "packed, ms", "of the peak")
    return markdown.table((*header, *names, "the best of them (goal)"), rows)


def render_start(path: Path = PATH) -> str:
    """A Markdown table: from files to the first answer."""
    rows = []
    for line in newest("serving_start", path):
        model = line["case"].removeprefix("serving/").removesuffix("/start")
        for name, entry in line["entrants"].items():
            times = f"{entry['import_s']:.2f}", f"{entry['answer_s']:.2f}"
            memory = f"{entry['resident_mib']:,.0f}", f"{entry['most_mib']:,.0f}"
            rows.append((f"{model} ({line['weights_mib']} MiB)", name, *times, *memory))
    header = ("model (weights)", "", "imports, s", "files to answer, s", "memory then, MiB", "at most, MiB")
    return markdown.table(header, rows)


def _is_own(name: str) -> bool:
    return name.startswith("bert_fast")
