"""Stored results of tokenizers: the peer that counts, tables, and a page that shows what is stored."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.markdown import page_with
from benchmarks.kit.results import RESULTS
from benchmarks.plot.__main__ import render_page
from benchmarks.plot.stored import load
from benchmarks.tokenizers import report
from benchmarks.tokenizers.stored import best_peer, newest, newest_lines


def entrant(ratio: float | None = None, differ: int = 0, **figures: Any) -> dict[str, Any]:
    made = {"mb_per_s": 100.0, "us": 1.0, "differ": differ, "version": "1.0"} | figures
    return made if ratio is None else made | {"ratio": ratio}


def line(case: str, **entrants: dict[str, Any]) -> dict[str, Any]:
    labels = {"one_thread": "bert_fast, one thread", "word_ids": "bert_fast, word ids"}
    labels |= {name: f"bert_fast, {name}" for name in ("offsets", "both")}
    named = {labels.get(name, name): figures for name, figures in entrants.items()}
    return {"kind": "tokenizer", "case": f"tokenizer/{case}", "time": "2026-01-02T03", "entrants": named}


LINES = [
    line(
        "en_docs/arrays", bert_fast=entrant(), nanotoken=entrant(3.0), tokie=entrant(1.5, differ=4),
        splintr=entrant(6.0),
    ),
    line("en_docs/padded", bert_fast=entrant(), nanotoken=entrant(2.5)),
    line("zh_docs/arrays", bert_fast=entrant(), splintr=entrant(9.0)),
    line("zh_docs/arrays", bert_fast=entrant(), splintr=entrant(3.0, mb_per_s=33.3)),
    line("en_11/one", bert_fast=entrant(us=0.25), splintr=entrant(1.25, us=0.31)),
    line("en_docs/threads", bert_fast=entrant(), one_thread=entrant(1.8), nanotoken=entrant(9.0)),
    line(
        "en_docs/origins", bert_fast=entrant(), offsets=entrant(1.6), word_ids=entrant(1.25),
        both=entrant(2.5),
    ),
]  # fmt: skip


def test_the_best_peer_is_the_fastest_with_right_ids() -> None:
    lines = newest(LINES)
    assert best_peer(lines["tokenizer/en_docs/arrays"]) == "nanotoken"
    assert best_peer(line("x", bert_fast=entrant(), tokie=entrant(2.0, differ=1))) is None


def test_tables_show_the_newest_figures() -> None:
    rendered = report.tables(newest(LINES))
    assert "| English books, 2 KB | arrays | 100 | **100 (3.0x)** | 100 (6.0x) | 100 (1.5x) * |" in rendered["speed"]
    assert "| English, 11 bytes | 0.250 |  | 0.310 |" in rendered["calls"]
    assert "| en_docs/threads | bert_fast, one thread | 100 | wall | 1.80x |" in rendered["own"]
    assert set(report.tables({}).values()) == {"Nothing is stored."}


def test_the_page_of_results_has_the_newest(tmp_path: Path) -> None:
    known = {"processor": "Made up", "threads": 2, "commit": "c0ffee"}
    (tmp_path / "tokenizers.jsonl").write_text("".join(json.dumps(known | stored) + "\n" for stored in LINES))
    (machine,) = load(tmp_path)
    page = render_page([machine])
    assert "<td>tokenizer/zh_docs/arrays</td><td>bert_fast 100 MB/s 1 us; splintr 33.3 MB/s 1 us (3.00x)</td>" in page
    assert "(9.00x)</td>" not in page.split("zh_docs", 1)[1].split("</tr>", 1)[0]


def test_tables_stand_between_marks() -> None:
    page = "a\n<!-- table: goals -->\nold\n<!-- end of table -->\nb\n<!-- table: start -->\n<!-- end of table -->\n"
    written = page_with(page, {"goals": "new", "start": "table"})
    assert written == page.replace("old", "new").replace("start -->\n", "start -->\ntable\n")
    with pytest.raises(ValueError, match="expected one of"):
        page_with("<!-- table: other -->\n<!-- end of table -->", {"goals": "new"})


def test_the_page_shows_what_is_stored() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    rendered = report.tables(newest_lines(RESULTS / "tokenizers.jsonl"))
    assert all(f"<!-- table: {name} -->" in page for name in rendered)
    assert page_with(page, rendered) == page, "run `python -m benchmarks.tokenizers --tables --write`"
