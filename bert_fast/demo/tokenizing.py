"""Step 1: the text through the C++ tokenizer and through Hugging Face `tokenizers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_fast import native
from bert_fast.demo.checks import Check
from bert_fast.demo.progress import Track, silent
from bert_fast.demo.timing import Timing, interleaved
from bert_fast.tokenization import BertTokenizer

__all__ = ["TokenizerResult", "compare_tokenizers"]


@dataclass(frozen=True)
class TokenizerResult:
    """Ids and speed of both tokenizers on the same passages, special tokens included, nothing cut off or padded."""

    implementation: str
    num_passages: int
    num_chars: int
    lengths: tuple[int, ...]  # tokens of every passage
    equal_passages: int
    equal_ids: int
    num_ids: int  # of the longer of the two rows, where they differ in length
    first_difference: str | None
    ours: Timing
    theirs: Timing

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every id of every passage."""
        found = f"{self.equal_ids:,} of {self.num_ids:,}"
        if self.first_difference is not None:
            found += f"; first difference: {self.first_difference}"
        return (Check("Token ids equal to those of tokenizers", found, "all", self.first_difference is None),)


def compare_tokenizers(
    folder: Path, tokenizer: BertTokenizer, texts: Sequence[str], rounds: int, track: Track = silent
) -> TokenizerResult:
    """Tokenizes `texts` to lists of ids with both, `rounds` times each in turn.

    Args:
        folder: has the tokenizer.json for Hugging Face.
        tokenizer: ours, of the same folder.
        texts: the passages.
        rounds: that count for the speed.
        track: told about every call.
    """
    import tokenizers

    texts = list(texts)
    peer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    peer.no_truncation()
    peer.no_padding()

    def run_ours() -> list[list[int]]:
        return tokenizer(texts, truncation=False, verbose=False)["input_ids"]

    def run_theirs() -> list[list[int]]:
        return [encoding.ids for encoding in peer.encode_batch_fast(texts)]  # the fast one tracks no offsets

    ours, theirs = run_ours(), run_theirs()
    with track("tokenizing", 2 * (rounds + 1)) as advance:
        contestants = {"ours": run_ours, "theirs": run_theirs}
        timings = interleaved(contestants, sum(map(len, theirs)), rounds, advance)
    differing = [index for index in range(len(texts)) if ours[index] != theirs[index]]
    return TokenizerResult(
        implementation="C++" if native.load() is not None else f"pure Python: {native.unavailable_reason()}",
        num_passages=len(texts),
        num_chars=sum(map(len, texts)),
        lengths=tuple(map(len, ours)),
        equal_passages=len(texts) - len(differing),
        equal_ids=sum(a == b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=False)),
        num_ids=sum(max(len(x), len(y)) for x, y in zip(ours, theirs, strict=True)),
        first_difference=_difference(texts, ours, theirs, differing[0]) if differing else None,
        ours=timings["ours"],
        theirs=timings["theirs"],
    )


def _difference(texts: Sequence[str], ours: list[list[int]], theirs: list[list[int]], index: int) -> str:
    pairs = zip(ours[index], theirs[index], strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours[index]), len(theirs[index])))
    window = slice(place, place + 5)
    return f"passage {index} ({texts[index][:40]!r}...), token {place}: {ours[index][window]}, {theirs[index][window]}"
