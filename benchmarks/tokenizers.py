"""Tokenizing real English books: the C++ core against Hugging Face `tokenizers`, ids only, each text once a round."""

import os
from pathlib import Path

from benchmarks.measure import interleaved

__all__ = ["tokenizer_documents", "tokenizer_lines"]

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DOCUMENT_LINES = 20  # about 2 KB


def tokenizer_lines(rounds: int) -> dict[str, object]:
    """One sentence a text."""
    return _compare("tokenizer/books/lines", _lines(), rounds)


def tokenizer_documents(rounds: int) -> dict[str, object]:
    """About 2 KB a text."""
    lines = _lines()
    documents = [" ".join(lines[i : i + DOCUMENT_LINES]) for i in range(0, len(lines), DOCUMENT_LINES)]
    return _compare("tokenizer/books/documents", documents, rounds)


def _lines() -> list[str]:
    text = (DATA / "pretrain_en" / "books_train.txt").read_text(encoding="utf-8")
    return [line for line in text.split("\n") if line]


def _compare(case: str, texts: list[str], rounds: int) -> dict[str, object]:
    from tokenizers import BertWordPieceTokenizer

    from bert_fast import native
    from bert_fast.tokenization.vocab import read_vocab

    os.environ["RAYON_NUM_THREADS"] = "1"
    vocab_file = DATA / "vocab" / "bert-base-uncased" / "vocab.txt"
    theirs = BertWordPieceTokenizer(str(vocab_file), lowercase=True)._tokenizer  # the Rust object itself
    library = native.load()
    assert library is not None, native.unavailable_reason()
    tokens = read_vocab(vocab_file)
    ours = library.WordPiece(list(tokens), lowercase=True)
    ids, _, _, _ = ours.encode(texts, num_threads=1)
    wanted = [i for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False) for i in encoding.ids]
    assert ids.tolist() == wanted, "ids differ: there is nothing to time"
    times = interleaved(
        {
            "bert_fast": lambda: ours.encode(texts, num_threads=1),
            "tokenizers": lambda: theirs.encode_batch_fast(texts, add_special_tokens=False),
        },
        rounds,
    )
    size = sum(len(text.encode()) for text in texts)
    return {
        "case": case,
        "tokens": len(ids),
        "bert_fast_mb_per_s": round(size / times["bert_fast"].median / 1e6, 1),
        "tokenizers_mb_per_s": round(size / times["tokenizers"].median / 1e6, 2),
        "bert_fast_tokens_per_s": round(len(ids) / times["bert_fast"].median),
        "tokenizers_tokens_per_s": round(len(ids) / times["tokenizers"].median),
        "ratio": round(times["bert_fast"].speedup_over(times["tokenizers"]), 1),
    }
