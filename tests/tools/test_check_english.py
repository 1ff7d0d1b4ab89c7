"""The check of prose finds long lines and words that a reader has to read twice, and nothing in code or tables."""

from tools import check_english


def found(text: str, name: str = "docs/a.md") -> list[str]:
    return list(check_english.problems(name, text))


def test_long_lines_are_found_with_their_numbers() -> None:
    long = "word " * 25
    assert found(f"# A\n\n{long}\n") == ["docs/a.md:3: 125 columns, expected at most 100"]
    assert not found(f"| {long} |\n```sh\n{long}\n```\n- [text](https://example.org/{'a' * 100})\n")
    assert not found(long, check_english.WIDE[0])


def test_words_are_found_across_lines_and_not_in_code() -> None:
    assert found("It is finished at a\nstroke.\n") == ["docs/a.md: 'at a stroke': at once"]
    assert len(found("Nobody runs it lest it fail. It takes 0.6 of the time.\n")) == 3
    assert not found("```\nnobody\n```\n")
    assert found("The goal is 2x.\n") and not found("The goal is 2x.\n", "docs/results.md")


def test_all_pages_are_clean() -> None:
    assert check_english.main() == 0
    assert all((check_english.ROOT / name).exists() for name in check_english.WIDE)
