"""The figures that README and docs/speed.md show are the stored ones."""

from pathlib import Path

from benchmarks import table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_newest_stored_results():
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for shown in (table.render(), table.render_fused(), table.render_runs()):
        assert shown in page, "run `python -m benchmarks.table` and paste its output"


def test_what_the_readme_shows_is_on_the_page():
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").splitlines()
    measured = (ROOT / "README.md").read_text(encoding="utf-8").split("## Measured")[1].split("\n## ")[0]
    rows = [line for line in measured.splitlines() if line.startswith("| ")]
    assert len(rows) > 8 and not [row for row in rows if row not in page]
