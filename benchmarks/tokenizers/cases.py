"""THE list of tokenizer cases: which texts, which form of output, who takes part.

Importing this module imports no torch and no tokenizer.
"""

from dataclasses import dataclass

from benchmarks.tokenizers.contestants import CONTESTANTS


@dataclass(frozen=True)
class Entrant:
    """A contestant in one form; a case may have one contestant in several."""

    label: str
    contestant: str
    form: str


@dataclass(frozen=True)
class TokenizerCase:
    """Texts in one form of output.

    entrants: the first is what the others are compared with. batch_size: texts of one call, at most.
    texts_per_round: fewer than the corpus gives. clock: "cpu" (of the process, which is pinned to one CPU) or "wall".
    is_primed: every entrant has met the very texts before, untimed: for what caches do.
    """

    corpus: str
    form: str
    entrants: tuple[Entrant, ...]
    batch_size: int = 128
    texts_per_round: int | None = None
    clock: str = "cpu"
    is_primed: bool = False

    @property
    def name(self) -> str:
        """Stable name used in results and on the command line."""
        return f"tokenizer/{self.corpus}/{self.form}{'/again' if self.is_primed else ''}"


def _all(form: str) -> tuple[Entrant, ...]:
    return tuple(Entrant(name, name, form) for name in CONTESTANTS)


def _of(contestants: str, form: str, **own: str) -> tuple[Entrant, ...]:
    """bert_fast in a form, the same in other forms by what is said of them, then contestants in the first."""
    others = (Entrant(f"bert_fast, {label}", "bert_fast", name) for name, label in own.items())
    peers = (Entrant(name, name, form) for name in contestants.split())
    return (Entrant("bert_fast", "bert_fast", form), *others, *peers)


_THREADS = _of("nanotoken splintr tokie", "two_threads", one_thread="one thread")
_ORIGINS = (
    *_of("", "arrays", offsets="offsets", word_ids="word ids", origins="both"),
    Entrant("tokenizers", "tokenizers", "origins"),
)
_PACKED = (
    *_of("", "packed", arrays="arrays", int64_arrays="arrays of int64", entries="types and positions, too"),
    Entrant("nanotoken", "nanotoken", "arrays"),
)

CASES = (
    TokenizerCase("en_docs", "arrays", _all("arrays")),
    TokenizerCase("en_docs", "padded", _all("padded")),
    TokenizerCase("en_docs", "lists", _all("lists")),
    TokenizerCase("en_short", "one", _all("one")),
    TokenizerCase("zh_docs", "arrays", _all("arrays")),
    TokenizerCase("multi_docs", "arrays", _all("arrays")),
    TokenizerCase("code_docs", "arrays", _all("arrays")),
    TokenizerCase("tweets", "arrays", _all("arrays"), batch_size=1024),
    TokenizerCase("en_11", "one", _all("one"), texts_per_round=3000),
    TokenizerCase("en_128", "one", _all("one")),
    TokenizerCase("en_docs", "threads", _THREADS, clock="wall"),
    TokenizerCase("en_docs", "origins", _ORIGINS),
    TokenizerCase("en_docs", "packed", _PACKED),
    TokenizerCase("en_short", "packed", _PACKED, batch_size=1024),
    TokenizerCase("xlmr_en", "arrays", _all("arrays")),
    TokenizerCase("xlmr_multi", "arrays", _all("arrays")),
    TokenizerCase("xlmr_250k_en", "arrays", _all("arrays")),
    TokenizerCase("xlmr_250k_multi", "arrays", _all("arrays")),
    TokenizerCase("en_docs_cased", "arrays", _all("arrays")),
    TokenizerCase("en_long", "arrays", _all("arrays")),
    TokenizerCase("en_short", "arrays", _all("arrays"), batch_size=1024),
    TokenizerCase("en_10k", "one", _all("one")),
    TokenizerCase("zh_docs", "lists", _all("lists")),
    TokenizerCase("en_docs", "arrays", _all("arrays")[:4], is_primed=True),
)
