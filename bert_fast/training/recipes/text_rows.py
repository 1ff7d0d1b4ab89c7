"""The texts that rows of an index belong to, found again in the files that were embedded."""

from collections.abc import Iterable, Sequence

from bert_fast.data.text_files import ReadOptions, TextSource
from bert_fast.training.recipes.embedding_files import read_groups

__all__ = ["read_rows"]


def read_rows(sources: Sequence[TextSource], rows: Iterable[int], field: str = "text") -> dict[int, str]:
    """Row to text, for some rows; the files are read up to the last of them, and no other text becomes a string.

    Args:
        sources: what `find_texts` found, in the order in which they were embedded.
        rows: numbers from 0 on, in any order.
        field: key of the text in JSON lines, column of Parquet files.

    Raises:
        SourceError: a source is not what its format says. OSError: it cannot be read.
        ValueError: there are fewer texts.
    """
    wanted, found, first, place = sorted(set(rows)), {}, 0, 0
    if not wanted:
        return {}
    for group in read_groups(sources, ReadOptions(field, "replace")):
        while place < len(wanted) and wanted[place] < first + len(group):
            found[wanted[place]] = group.text(wanted[place] - first)
            place += 1
        if place == len(wanted):
            return found
        first += len(group)
    raise ValueError(f"texts: expected those that were embedded, more than {wanted[-1]:,}, got {first:,}")
