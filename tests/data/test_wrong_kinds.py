"""Arguments of the wrong kind: the message names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.data import Batches, PackedCollator, tokenize_files
from bert_fast.data.conll import read_conll
from bert_fast.data.sequences import Sequences
from bert_fast.data.text_sources import find_sources
from bert_fast.files import path_name

IDS, BOUNDARIES = np.zeros(4, np.int32), np.array([0, 4])

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "path that is a list": (lambda: read_conll([]), TypeError, "data: expected a str or a path, got list"),
    "path with NUL": (lambda: read_conll("a\0b"), ValueError, "data: expected the name of a file, got one with a NUL"),
    "files that are one": (lambda: find_sources("a.txt"), TypeError, "files: expected a list of paths and data sets"),
    "files that are a number": (lambda: find_sources(3), TypeError, "files: expected a list of paths and data sets"),
    "a file that is a number": (lambda: find_sources([0.5]), TypeError, "files: expected a str or a path, got float"),
    "format": (lambda: find_sources([], {}), ValueError, "format: expected 'auto', .*, got {}"),
    "seconds": (
        lambda: tokenize_files([], "store", None, checkpoint_seconds=int),
        TypeError,
        "checkpoint_seconds: expected a number, got type",
    ),
    "seed": (lambda: Batches([1], batch_size=1, seed=float("inf")), TypeError, "seed: expected an int, got float"),
    "collator": (lambda: PackedCollator(3), TypeError, "collator: expected a function of features, got int"),
    "ids that are a list": (lambda: Sequences([1], BOUNDARIES), TypeError, "ids: expected an array, got list"),
    "no boundaries": (lambda: Sequences(IDS, None), TypeError, "boundaries: expected an array, got NoneType"),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_the_wrong_kind_are_named(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()


def test_names_of_files_are_strings_and_paths() -> None:
    assert path_name("path", Path("a") / "b") == path_name("path", "a/b") == "a/b"
    with pytest.raises(TypeError, match="path: expected a str or a path, got bytes"):
        path_name("path", b"a")
    for name, what in (("", "''"), ("\ud800", "half of a surrogate pair")):
        with pytest.raises(ValueError, match=f"path: expected the name of a file, got {what}"):
            path_name("path", name)
    assert path_name("path", "\udcff") == "\udcff"  # a byte that is not UTF-8, as os.listdir gives it
