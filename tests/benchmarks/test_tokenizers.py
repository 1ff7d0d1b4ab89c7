"""Timing tokenizers: texts are new, every entrant gets the same ones, wrong ids are found, figures are right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.kit.results import DATA
from benchmarks.tokenizers import contestants, jobs, stream
from benchmarks.tokenizers.cases import CASES, Entrant, TokenizerCase
from benchmarks.tokenizers.corpora import CORPORA, pieces, slices, windows

TEXTS = [f"{word} {number}" for number in range(20) for word in ("one", "two", "three")]


class Fake:
    """A tokenizer whose ids are lengths of words between 1 and 2; remembers the batches that it was given."""

    def __init__(self, extra: int = 0, has_special: bool = True) -> None:
        self.extra, self.has_special = extra, has_special
        self.batches: list[list[str]] = []

    def lists(self, texts: list[str]) -> list[list[int]]:
        self.batches.append(list(texts))
        rows = [[len(word) + 2 + self.extra for word in text.split()] for text in texts]
        return [[1, *row, 2] for row in rows] if self.has_special else rows

    def arrays(self, texts: list[str]) -> Any:
        rows = self.lists(texts)
        return np.array([i for row in rows for i in row]), np.cumsum([0, *map(len, rows)])

    def origins(self, texts: list[str]) -> Any:
        ids, boundaries = self.arrays(texts)
        return ids, boundaries, np.stack((ids, ids), axis=1), ids + self.extra

    def padded(self, texts: list[str]) -> Any:
        rows = np.zeros((len(texts), 8), np.int64)
        for row, ids in zip(rows, self.lists(texts), strict=True):
            row[: len(ids)] = ids
        return {"input_ids": rows, "attention_mask": (rows > 0).astype(np.int64)}

    def forms(self) -> contestants.Forms:
        one: Callable[[str], Any] = lambda text: self.lists([text])[0]  # noqa: E731
        names = ("arrays", "padded", "lists", "origins")
        return {name: getattr(self, name) for name in names} | {"one": one, "offsets": self.origins}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Fake]]:
    """Takes the place of all contestants; those made, by name. kitoken has no special tokens, tokie is wrong."""
    made: dict[str, list[Fake]] = {}
    kinds: dict[str, Callable[[], Fake]] = {
        "bert_fast": Fake,
        "nanotoken": Fake,
        "tokie": lambda: Fake(extra=1),
        "kitoken": lambda: Fake(has_special=False),
        "tokenizers": Fake,
    }

    def load(name: str, vocabulary: object) -> contestants.Forms:
        if name == "splintr":
            raise ValueError("not this vocabulary")
        made.setdefault(name, []).append(kinds[name]())
        return made[name][-1].forms()

    monkeypatch.setattr(stream, "load", load)
    monkeypatch.setattr(stream, "missing", lambda name: "not installed" if name == "flash" else None)
    monkeypatch.setattr(stream, "version", lambda name: "1.0")
    return made


def case(form: str, *names: str, **changes: Any) -> TokenizerCase:
    return TokenizerCase("en_docs", form, tuple(Entrant(name, name, form) for name in names), **changes)


def test_every_text_is_timed_once_by_everyone(fakes: dict[str, list[Fake]]) -> None:
    found = stream.life(
        case("arrays", "bert_fast", "nanotoken", batch_size=4), TEXTS, 3, seed=1, other_texts=["before"]
    )
    assert found["texts"] == 3 * 8 and len(found["bytes"]) == 3  # slices of 10, whole batches of 4
    assert [len(found["seconds"][name]) for name in ("bert_fast", "nanotoken")] == [3, 3]
    assert found["differ"] == {"bert_fast": 0, "nanotoken": 0} and found["left_out"] == {}
    dealt = [slice_[:8] for slice_ in slices(TEXTS, stream.WARMUP + 3, 1)]
    for name in ("bert_fast", "nanotoken"):
        given = [text for batch in fakes[name][0].batches for text in batch]
        assert given[0] == "before"
        wanted: list[str] = []
        for index, slice_ in enumerate(dealt):
            wanted += [*dealt[index - 1], *slice_] if index else slice_  # short: all of the slice before is run in
        assert given[1:] == wanted
        assert max(map(len, fakes[name][0].batches)) == 4


def test_who_does_not_take_part_says_why_and_who_errs_is_marked(fakes: dict[str, list[Fake]]) -> None:
    found = stream.life(case("arrays", "bert_fast", "tokie", "kitoken", "flash", "splintr", "tokenizers"), TEXTS, 2, 0)
    assert found["left_out"] == {"flash": "not installed", "splintr": "ValueError: not this vocabulary"}
    assert found["differ"] == {"bert_fast": 0, "tokie": 60, "kitoken": 0, "tokenizers": 0}
    missing = TokenizerCase("en_docs", "x", (Entrant("bert_fast", "bert_fast", "x"),))
    assert stream.life(missing, TEXTS, 2, 0)["left_out"] == {"bert_fast": "does not offer it"}


@pytest.mark.parametrize("form", ["arrays", "padded", "lists", "one", "origins"])
def test_wrong_results_of_ours_are_not_timed(
    fakes: dict[str, list[Fake]], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    entrants = case(form, "bert_fast", "nanotoken")
    assert stream.life(entrants, TEXTS, 2, 0)["differ"] == {"bert_fast": 0, "nanotoken": 0}
    right = stream.load
    monkeypatch.setattr(stream, "load", lambda n, v: Fake(extra=1).forms() if n == "bert_fast" else right(n, v))
    with pytest.raises(RuntimeError, match="12 texts differ from tokenizers: nothing to time"):
        stream.life(entrants, TEXTS, 2, 0)


def test_a_primed_case_has_met_the_texts(fakes: dict[str, list[Fake]]) -> None:
    stream.life(case("arrays", "bert_fast", is_primed=True), TEXTS, 1, 0)
    stream.life(case("one", "bert_fast", is_primed=True, texts_per_round=5), TEXTS, 1, 0)
    batches, ones = (fake.batches for fake in fakes["bert_fast"])
    assert batches[-1] == batches[-2] and [batch[0] for batch in ones[-15:]] == 3 * [batch[0] for batch in ones[-5:]]


def test_slices_are_disjoint_and_as_the_seed_says() -> None:
    dealt = slices(TEXTS, 7, seed=3)
    assert [len(slice_) for slice_ in dealt] == [8] * 7
    assert len({text for slice_ in dealt for text in slice_}) == 56
    assert dealt == slices(TEXTS, 7, seed=3) != slices(TEXTS, 7, seed=4)
    with pytest.raises(ValueError, match="expected at least 61, one for each slice, got 60"):
        slices(TEXTS, 61, seed=0)


def test_texts_have_the_size_that_they_should() -> None:
    assert list(pieces(["é", "bc", "d", "e"], 5)) == ["é bc"]
    assert list(windows(["ab", "c", "def", "g", "é", "h"], 4)) == ["ab c", "g é"]
    assert list(windows(["abcdef"], 4)) == []


def test_every_corpus_is_large_enough() -> None:
    if not DATA.exists():
        pytest.skip(f"the texts are not there: {DATA}")
    for corpus in CORPORA.values():
        texts = corpus.read()
        assert len(texts) >= stream.WARMUP + jobs.ROUNDS and all(texts), corpus.name
        assert corpus.after is None or CORPORA[corpus.after].vocabulary == corpus.vocabulary
    for name, size in (("en_11", 11), ("en_128", 128)):
        texts = CORPORA[name].read()
        assert {len(text.encode()) for text in texts} == {size} and len(set(texts)) == len(texts)


# Without the vocabularies of 250,002 pieces, which take a minute and a half to train; the benchmark looks at every id.
@pytest.mark.parametrize("case_", [one for one in CASES if "250k" not in one.name], ids=lambda c: c.name)
def test_ours_is_right_in_every_case(case_: TokenizerCase) -> None:
    if not DATA.exists():
        pytest.skip(f"the texts are not there: {DATA}")
    corpus = CORPORA[case_.corpus]
    judge, ours = contestants.load("tokenizers", corpus.vocabulary), contestants.load("bert_fast", corpus.vocabulary)
    texts = corpus.read()[:6]
    for entrant in case_.entrants:
        if entrant.contestant == "bert_fast":
            _, outputs = stream._timed(case_, ours[entrant.form], texts)
            assert stream._count_different(case_, entrant, outputs, stream._truth(case_, judge, texts)) == 0


def made_life(ours: list[float], theirs: list[float], differ: int = 0) -> dict[str, Any]:
    seconds = {"bert_fast": ours, "nanotoken": theirs}
    return {
        "bytes": [1_000_000] * len(ours),
        "texts": 100 * len(ours),
        "seconds": seconds,
        "differ": {"bert_fast": 0, "nanotoken": differ},
        "versions": {"bert_fast": "0.1", "nanotoken": "0.2"},
        "left_out": {"tokie": "not installed"},
    }


def test_lives_are_joined_round_by_round() -> None:
    lives = [made_life([0.1, 0.2, 0.1], [0.3, 0.2, 0.2]), made_life([0.1, 0.1], [0.4, 0.4], differ=2)]
    found = jobs.joined(case("one", "bert_fast", "nanotoken", "tokie"), lives)
    ours, theirs = found["entrants"]["bert_fast"], found["entrants"]["nanotoken"]
    assert ours == {"mb_per_s": 10.0, "p20": 10.0, "p80": 10.0, "us": 1000.0, "differ": 0, "version": "0.1"}
    assert theirs["ratio"] == 3.0 and theirs["differ"] == 2  # ratios 3, 1, 2, 4, 4
    assert (found["rounds"], found["bytes"], found["texts"]) == (5, 5_000_000, 500)
    assert "tokie" not in found["entrants"] and found["left_out"] == {"tokie": "not installed"}
