"""The C++ Unigram core and the same tokenizer in Hugging Face `tokenizers`, both of one tokenizer.json."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_fast.testing.charsmap import encoded, nfkc_map
from bert_fast.tokenization.unigram_file import read_unigram

from .native_core import module, read_books, read_corpus, tokenizers

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
MARK = "\u2581"
Piece = tuple[str, float]


def metaspace(scheme: str = "always", split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


@functools.cache
def nfkc() -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": encoded(nfkc_map())}


def strip(left: bool, right: bool) -> dict[str, Any]:
    return {"type": "Strip", "strip_left": left, "strip_right": right}


def replace(pattern: str, content: str, kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def deberta(*, lower: bool = False, punctuation: bool = False, scheme: str = "always") -> dict[str, Any]:
    """What transformers 5 builds as `DebertaV2Tokenizer`."""
    steps = [replace(r"\s{2,}|[\n\r\t]", " "), {"type": "NFC"}, strip(False, True)]
    splits = [{"type": "Punctuation", "behavior": "Isolated"}, metaspace(scheme)]
    return {
        "normalizer": sequence("normalizers", *[{"type": "Lowercase"}][: int(lower)], *steps),
        "pre_tokenizer": sequence("pretokenizers", *splits[1 - int(punctuation) :]),
    }


def sequence(key: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def forms() -> dict[str, dict[str, Any]]:
    """Normalizers and pre-tokenizers as files hold them, by the models that have them."""
    split = sequence("pretokenizers", {"type": "WhitespaceSplit"}, metaspace())
    older = {"type": "Metaspace", "replacement": MARK, "add_prefix_space": True, "str_rep": MARK}
    older_split = sequence("pretokenizers", {"type": "WhitespaceSplit"}, older)
    return {
        "xlm-r": {"normalizer": nfkc(), "pre_tokenizer": older_split},
        "converted": {
            "normalizer": sequence("normalizers", nfkc(), replace(" {2,}", " ")),
            "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, metaspace("first")),
        },
        "bge-m3": {
            "normalizer": sequence("normalizers", nfkc(), strip(False, True), replace(" {2,}", MARK)),
            "pre_tokenizer": metaspace(),
        },
        "strip both": {
            "normalizer": sequence("normalizers", strip(True, True), nfkc(), replace(" {2,}", " ")),
            "pre_tokenizer": metaspace(),
        },
        "first": {"normalizer": nfkc(), "pre_tokenizer": metaspace("first")},
        "never": {"normalizer": nfkc(), "pre_tokenizer": metaspace("never")},
        "deberta": deberta(),
        "deberta, lower and words": deberta(lower=True, punctuation=True),
        "deberta, first": deberta(punctuation=True, scheme="first"),
        "deberta, converted": {
            "normalizer": sequence(
                "normalizers", {"type": "Lowercase"}, strip(True, True), nfkc(), replace(" {2,}", " ")
            ),
            "pre_tokenizer": deberta(punctuation=True)["pre_tokenizer"],
        },
        "whole": {"normalizer": replace(" {3,}", "  "), "pre_tokenizer": metaspace(split=False)},
        "bare": {"normalizer": None, "pre_tokenizer": split},
        "quotes": {
            "normalizer": sequence(
                "normalizers", replace("``", '"', "String"), replace("''", '"', "String"), nfkc(), replace(" +", " ")
            ),
            "pre_tokenizer": metaspace(),
        },
    }


def added_token(content: str, token_id: int, **switches: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **(flags | switches)}


def make_state(
    pieces: Sequence[Piece],
    form: dict[str, Any],
    *,
    byte_fallback: bool = False,
    added: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A tokenizer.json of special tokens, these pieces and <mask>, by default with XLM-R's added tokens."""
    vocab: list[Piece] = [*((token, 0.0) for token in SPECIAL), *pieces, ("<mask>", 0.0)]
    if added is None:
        added = [added_token(token, place) for place, token in enumerate(SPECIAL)]
        added.append(added_token("<mask>", len(vocab) - 1, lstrip=True))
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    sep = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        **form,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*template, sep],
            "pair": [*template, sep, sep, {"Sequence": {"id": "B", "type_id": 0}}, sep],
            "special_tokens": {
                token: {"id": token, "ids": [SPECIAL.index(token)], "tokens": [token]} for token in ("<s>", "</s>")
            },
        },
        "decoder": metaspace(),
        "model": {
            "type": "Unigram",
            "unk_id": 3,
            "vocab": [list(piece) for piece in vocab],
            "byte_fallback": byte_fallback,
        },
    }


def make_library(state: dict[str, Any]) -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def make_engine(state: dict[str, Any], **options: Any) -> Any:
    """The C++ core as the Python classes make it of a file."""
    assert module is not None
    file = read_unigram(Path("tokenizer.json"), state)
    in_order = sorted(state["added_tokens"], key=lambda token: (not token["special"], token["id"]))
    added = [
        (token["content"], token["id"], *(token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")))
        for token in in_order
    ]
    return module.Unigram(file.vocab, added_tokens=added, **file.engine_options, **options)


def train(texts: Sequence[str], size: int, form: dict[str, Any]) -> list[Piece]:
    """Pieces and scores that the library's trainer finds in the texts."""
    library = tokenizers.Tokenizer(tokenizers.models.Unigram())
    state = json.loads(library.to_str())
    library = tokenizers.Tokenizer.from_str(json.dumps({**state, **form}))
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", show_progress=False)
    library.train_from_iterator(texts, trainer)
    vocab = json.loads(library.to_str())["model"]["vocab"]
    return [(piece, score) for piece, score in vocab if piece not in (*SPECIAL, "<mask>")]


@functools.cache
def trained_pieces(data: Path) -> list[Piece]:
    """Pieces of some English lines and of lines in many languages; some characters of these stay unknown."""
    lines = [*read_books(data)[:4000], *read_corpus(data)[::40]]
    known = {c for line in lines[:4000] for c in line} | set(map(chr, range(0x250)))
    return train([line for line in lines if known.issuperset(line)], 4000, forms()["xlm-r"])
