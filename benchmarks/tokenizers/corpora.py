"""Texts that tokenizers are timed on: real ones of `../shared/data` and Python's own library, cut into rounds.

No text comes twice: a corpus is shuffled and dealt out into slices, one for each round. Nothing is recombined, so words
have their real distribution, rare ones included.
"""

import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.results import DATA
from benchmarks.tokenizers.vocabularies import UnigramVocabulary, Vocabulary

DOCUMENT_BYTES = 2000
LONG_BYTES = 250_000
CODE_BYTES = 3_500_000  # of the standard library, which is larger: about as much as there is English


@dataclass(frozen=True)
class Corpus:
    """Texts of one kind and the vocabulary that belongs to them. `read` raises OSError where they are not there.

    what: in tables. after: another corpus with the same vocabulary, which tokenizers meet before, uncounted: what there
    is of this one would not fill a cache of words as long use does.
    """

    name: str
    what: str
    vocabulary: Vocabulary
    read: Callable[[], list[str]]
    after: str | None = None


def slices(texts: list[str], count: int, seed: int) -> list[list[str]]:
    """`count` disjoint slices of as many texts each, shuffled as the seed decides. ValueError if there are too few."""
    if len(texts) < count:
        raise ValueError(f"texts: expected at least {count}, one for each slice, got {len(texts)}")
    order = list(texts)
    random.Random(seed).shuffle(order)
    size = len(order) // count
    return [order[i * size : (i + 1) * size] for i in range(count)]


def pieces(lines: Iterable[str], num_bytes: int, joint: str = " ") -> Iterator[str]:
    """Consecutive lines joined until they have `num_bytes` of UTF-8; what is left over at the end is dropped."""
    piece: list[str] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line.encode()) + len(joint)
        if size >= num_bytes:
            yield joint.join(piece)
            piece, size = [], 0


def windows(words: list[str], num_bytes: int) -> Iterator[str]:
    """Consecutive words between single spaces, of exactly `num_bytes` of UTF-8 together; none overlap."""
    start = 0
    while start < len(words):
        stop, size = start, -1
        while stop < len(words) and size < num_bytes:
            size += len(words[stop].encode()) + 1
            stop += 1
        if size == num_bytes:
            yield " ".join(words[start:stop])
        start = stop if size == num_bytes else start + 1


def _lines(*names: str) -> list[str]:
    text = "\n".join((DATA / name).read_text(encoding="utf-8") for name in names)
    return [line for line in text.split("\n") if line]


def _books() -> list[str]:
    return _lines("pretrain_en/books_train.txt", "pretrain_en/books_valid.txt")


def _book_pieces(num_bytes: int = DOCUMENT_BYTES) -> list[str]:
    return list(pieces(_books(), num_bytes))


def _book_windows(num_bytes: int) -> list[str]:
    return list(dict.fromkeys(windows(" ".join(_books()).split(), num_bytes)))


def _short() -> list[str]:
    return list(dict.fromkeys(line for line in _books() if 100 <= len(line.encode()) <= 300))


def _social() -> list[str]:
    return list(dict.fromkeys(_lines("text_social/tweets.txt", "text_social/youtube_comments_emoji.txt")))


def _chinese() -> list[str]:
    return list(pieces(_lines("text_zh/wiki_zh_cmrc2018_dev.txt"), DOCUMENT_BYTES, ""))


def _languages_files() -> list[str]:
    folder = DATA / "text_multilingual" / "udhr"
    names = sorted(str(path.relative_to(DATA)) for path in folder.glob("*.txt"))
    if not names:
        raise FileNotFoundError(f"{folder}: no texts")
    return names


def _languages() -> list[str]:
    return [text for name in _languages_files() for text in pieces(_lines(name), DOCUMENT_BYTES)]


def _quarter() -> list[str]:
    return [*_books()[::4], *_lines(*_languages_files())[::4]]


def _all_lines() -> list[str]:
    """Of all text files beside the project: enough for as many pieces as XLM-R has."""
    endings = {".csv", ".conllu", ".iob2", ".json", ".jsonl", ".tsv", ".txt"}
    files = [path for path in sorted(DATA.rglob("*")) if path.suffix in endings and path.is_file()]
    return [line for path in files for line in path.read_text(encoding="utf-8", errors="ignore").splitlines()]


def _code() -> list[str]:
    """Python's standard library (its own files, not packages): indentation and line ends as they are."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in library.rglob("*.py") if not {"site-packages", "dist-packages", "test"} & set(p.parts))
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    for path in paths:
        if len(texts) * DOCUMENT_BYTES > CODE_BYTES:
            break
        try:
            texts += pieces(path.read_text(encoding="utf-8").split("\n"), DOCUMENT_BYTES, "\n")
        except UnicodeDecodeError:
            continue
    return texts


UNCASED = Vocabulary("bert-base-uncased", lowercase=True)
_CASED = Vocabulary("bert-base-cased", lowercase=False)
_CHINESE = Vocabulary("bert-base-chinese", lowercase=True)
_MULTILINGUAL = Vocabulary("bert-base-multilingual-cased", lowercase=False)
# Of a quarter of the texts that are measured, and of all texts that there are: words are fewer pieces than elsewhere.
_XLM_R = UnigramVocabulary("unigram 16,000", False, 16_000, _quarter)
_XLM_R_LARGE = UnigramVocabulary("unigram 250,002", False, 250_002, _all_lines)

CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("en_docs", "English books, 2 KB", UNCASED, _book_pieces),
        Corpus("en_docs_cased", "English books, 2 KB, cased", _CASED, _book_pieces),
        Corpus("en_long", "English books, 250 KB", UNCASED, lambda: _book_pieces(LONG_BYTES)),
        Corpus("en_10k", "English books, 10 KB", UNCASED, lambda: _book_pieces(10_000)),
        Corpus("en_short", "English sentences, 100 to 300 bytes", UNCASED, _short),
        Corpus("en_11", "English, 11 bytes", UNCASED, lambda: _book_windows(11)),
        Corpus("en_128", "English, 128 bytes", UNCASED, lambda: _book_windows(128)),
        Corpus("zh_docs", "Chinese Wikipedia, 2 KB", _CHINESE, _chinese),
        Corpus("multi_docs", "99 languages, 2 KB, multilingual cased", _MULTILINGUAL, _languages),
        Corpus("xlmr_en", "English books, 2 KB, Unigram", _XLM_R, _book_pieces),
        Corpus("xlmr_multi", "99 languages, 2 KB, Unigram", _XLM_R, _languages),
        Corpus("xlmr_250k_en", "English books, 2 KB, Unigram, 250,002 pieces", _XLM_R_LARGE, _book_pieces),
        Corpus("xlmr_250k_multi", "99 languages, 2 KB, Unigram, 250,002 pieces", _XLM_R_LARGE, _languages),
        Corpus("code_docs", "Python source, 2 KB", UNCASED, _code, after="en_docs"),
        Corpus("tweets", "tweets and comments with emoji", UNCASED, _social, after="en_docs"),
    )
}
