"""The README's figures are the stored ones."""

from pathlib import Path

from benchmarks import table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_shows_the_newest_stored_results():
    readme = README.read_text(encoding="utf-8")
    for shown in (table.render(), table.render_fused(), table.render_runs()):
        assert shown in readme, "run `python -m benchmarks.table` and paste its output"
