"""Which double a score of tokenizer.json is: the one that is written, or the one that `tokenizers` rounds it to.

Transformers 5 has classes that build their model of the numbers as Python reads them, and leaves the file to
`tokenizers` for others. Where two ways to cut a word have equal sums of scores the last bit decides.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bert_fast import XLMRobertaTokenizer
from bert_fast.huggingface.same_tokenizer import same_tokenizer
from bert_fast.tokenization import load_tokenizer

from .native_core import needs_native
from .unigram_core import Piece, forms, make_state

pytestmark = needs_native

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
TEXTS = [character * size for character in CHARACTERS for size in range(2, 16)]


def tied_pieces() -> list[Piece]:
    """Each character once, twice and three times: a run of it can be cut in several ways with nearly equal sums."""
    rng = random.Random(0)
    pieces: list[Piece] = []
    for character in CHARACTERS:
        score = -rng.uniform(4, 8)
        pieces += [(character, score), (character * 2, 1.5 * score), (character * 3, -rng.uniform(12, 20))]
    return pieces


def folder_of(path: Path, class_name: str | None, model_type: str | None) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(make_state(tied_pieces(), forms()["xlm-r"])), encoding="utf-8")
    if class_name is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}), encoding="utf-8")
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return path


def their_tokenizer(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("what is matched is transformers 5")
    return transformers.AutoTokenizer.from_pretrained(str(path))


def ids_of(tokenizer: Any) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(TEXTS)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("class_name", "model_type"),
    [
        ("XLMRobertaTokenizer", None),
        ("XLMRobertaTokenizerFast", "bert"),
        ("CamembertTokenizer", None),
        ("PreTrainedTokenizerFast", "xlm-roberta"),
        ("TokenizersBackend", None),
        (None, "xlm-roberta"),
        (None, "camembert"),
        (None, None),
    ],
)
def test_ids_are_those_of_the_class_that_a_folder_names(
    tmp_path: Path, class_name: str | None, model_type: str | None
) -> None:
    """Read from the folder, from what was saved of it, and taken from the tokenizer of transformers."""
    folder = folder_of(tmp_path / "model", class_name, model_type)
    theirs, ours = their_tokenizer(folder), load_tokenizer(folder)
    expected = ids_of(theirs)
    assert ids_of(ours) == expected
    ours.save_pretrained(tmp_path / "saved")
    assert ids_of(load_tokenizer(tmp_path / "saved")) == expected
    assert ids_of(their_tokenizer(tmp_path / "saved")) == expected
    same = same_tokenizer(theirs)
    assert not isinstance(same, str), same
    assert ids_of(same) == expected


def test_a_file_alone_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = folder_of(tmp_path / "model", "XLMRobertaTokenizer", None)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [encoding.ids for encoding in library.encode_batch(TEXTS)]
    rounded, exact = XLMRobertaTokenizer(folder / "tokenizer.json"), XLMRobertaTokenizer.from_pretrained(folder)
    assert ids_of(rounded) == expected
    assert ids_of(exact) != expected  # or this file would test nothing
    assert rounded.identity() != exact.identity()
    assert ids_of(XLMRobertaTokenizer.from_pretrained(folder, exact_scores=False)) == expected
    assert ids_of(XLMRobertaTokenizer(folder / "tokenizer.json", exact_scores=True)) == ids_of(exact)
