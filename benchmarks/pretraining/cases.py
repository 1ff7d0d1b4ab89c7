"""What the pre-trained model is fine-tuned for: examples, which of them are learned from, and their bare texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.record import DATA
from benchmarks.pretraining.starts import STARTS

# Of Universal Dependencies, version 2.
_PARTS_OF_SPEECH = [
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A task and its examples.

    words: by which readers know it. folder, train, valid: files of examples to learn from and to judge by. task: of the
    command line. settings: of its runs. texts: columns of a file with a header that hold text; none of a file in CoNLL
    columns. every: of so many examples one is learned from. folds: parts of these that learning rates are judged by.
    starts: names of those that are compared.
    """

    words: str
    folder: Path
    train: str
    valid: str
    task: str
    settings: dict[str, Any]
    texts: tuple[str, ...] = ()
    every: int = 1
    folds: int = 1
    starts: tuple[str, ...] = ("random", "pre-trained")

    def examples(self) -> list[str]:
        """Those to learn from, as they stand in the file."""
        return self._parts()[1][:: self.every]

    def unlabelled(self) -> list[str]:
        """Texts of the file to learn from, all of it, whatever `every` is."""
        header, examples = self._parts()
        if not self.texts:
            return [" ".join(line.split("\t")[0] for line in example.split("\n")) for example in examples]
        places = [header.rstrip("\n").split("\t").index(name) for name in self.texts]
        return [example.split("\t")[place] for example in examples for place in places]

    def write(self, path: Path, examples: Sequence[str]) -> str:
        """A file of some `examples`, with the ending that such a file has; returns its name."""
        path = path.with_suffix(Path(self.train).suffix)
        path.write_text(self._parts()[0] + self._separator.join(examples) + "\n", encoding="utf-8")
        return str(path)

    @property
    def _separator(self) -> str:
        return "\n" if self.texts else "\n\n"

    def _parts(self) -> tuple[str, list[str]]:
        """(header with its end, or nothing; examples)."""
        whole = (self.folder / self.train).read_text(encoding="utf-8").strip("\n")
        header, rest = "", whole
        if self.texts:
            header, _, rest = whole.partition("\n")
            header += "\n"
        return header, rest.split(self._separator)


def _films(words: str, epochs: int, **others: Any) -> Case:
    settings = {"text": "sentence", "epochs": epochs}
    folder = DATA / "classification" / "sentence_polarity"
    starts = tuple(STARTS)
    return Case(words, folder, "train.tsv", "dev.tsv", "classify", settings, ("sentence",), starts=starts, **others)


def _tags(words: str, epochs: int, **others: Any) -> Case:
    """UD EWT without its own training part, which is not here: learned from dev, judged by test."""
    settings = {"label_column": 2, "labels": _PARTS_OF_SPEECH, "epochs": epochs}
    folder = DATA / "sequence_labelling" / "ud_ewt_en"
    return Case(words, folder, "dev.conll", "test.conll", "ner", settings, **others)


CASES = {
    "few": _films("film snippets, 960", 5, every=10, folds=3),
    "all": _films("film snippets, 9,596", 2),
    "tags-few": _tags("parts of speech, 201 sentences", 20, every=10, folds=3),
    "tags": _tags("parts of speech, 2,001 sentences", 5),
    "pairs": Case(
        "does a sentence answer a question, 1,833 pairs",
        DATA / "classification" / "question_sentence_pairs",
        "train.tsv",
        "dev.tsv",
        "classify",
        {"text": "question", "text_pair": "sentence", "epochs": 5},
        ("question", "sentence"),
    ),
}
