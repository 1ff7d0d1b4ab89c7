"""What a tokenizer.json with a Unigram model says, as arguments of the engine; parts that it does not run are refused.

Only what SentencePiece models become when they are converted is read: a Precompiled character map and what stands
around it, or what transformers 5 puts in its place for DeBERTa; Metaspace alone or behind WhitespaceSplit or
Punctuation; the template of special tokens.
"""

import base64
import binascii
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_fast.tokenization.json_files import ID, LIST, SWITCH, TEXT, Kind, check_kinds, type_of
from bert_fast.tokenization.layout import PairForm
from bert_fast.tokenization.template_file import read_template

_METASPACE = {
    "replacement": Kind("one character", lambda value: isinstance(value, str) and len(value) == 1),
    "prepend_scheme": Kind("'always', 'first' or 'never'", lambda value: value in ("always", "first", "never")),
    "split": SWITCH.or_null(),
    "add_prefix_space": SWITCH.or_null(),
}
_MODEL = {"unk_id": ID, "vocab": LIST, "byte_fallback": SWITCH.or_null()}
_STRIP = {"strip_left": SWITCH, "strip_right": SWITCH}
_REPLACE = {"content": TEXT}
_WHITESPACE = r"\s{2,}|[\n\r\t]"  # the pattern of DeBERTa's files
_LEAST_SPACES = 1000  # of a pattern like " {2,}"


@dataclass(frozen=True)
class UnigramFile:
    """A tokenizer.json that was understood.

    Args:
        vocab: pieces by id.
        engine_options: arguments of the engine, all but the vocabulary and the added tokens.
        pairs: what rows of two texts look like.
        named: "unk_token", "cls_token" and "sep_token".
        mark: what the decoder turns into spaces; None: it joins tokens by spaces.
        drops_first: whether the decoder leaves a mark at the start of a text out.
    """

    vocab: list[str]
    engine_options: dict[str, Any]
    pairs: PairForm
    named: dict[str, str]
    mark: str | None
    drops_first: bool


def read_unigram(path: Path, state: Mapping[str, Any], exact_scores: bool = False) -> UnigramFile:
    """Reads the object in a tokenizer.json (its added tokens and padding are left to the caller).

    Args:
        path: of the file, for messages.
        state: the object.
        exact_scores: take scores as they are written, and not as the library's JSON reader rounds them.

    Raises:
        ValueError: it is no Unigram tokenizer, or has a part that the engine does not run; the message names the file,
            the part and what is expected.
    """
    model = state.get("model") or {}
    kind = type_of(model)
    if kind != "Unigram":
        raise ValueError(f"{path}: expected a Unigram model, got {kind}")
    check_kinds(path, {"unk_id": None, "vocab": None, **model}, _MODEL, "model: ")
    vocab, scores = _read_vocab(path, model["vocab"])
    if not exact_scores:
        scores = list(map(_as_read, scores))
    unk_id = model["unk_id"]
    if unk_id >= len(vocab):
        raise ValueError(f"{path}: model: unk_id: expected the id of one of the {len(vocab)} pieces, got {unk_id}")
    charsmap, steps = _read_normalizer(path, state.get("normalizer"))
    processor = state.get("post_processor")
    kind = "none" if processor is None else type_of(processor)
    template = read_template(processor) if kind == "TemplateProcessing" else None
    if template is None:
        raise ValueError(
            f"{path}: post_processor: expected a TemplateProcessing that makes <s> A </s> and <s> A </s></s> B </s>, "
            f"got {kind}"
        )
    mark, drops_first = _read_decoder(path, state.get("decoder"))
    options = {
        "scores": scores,
        "unk_id": unk_id,
        "byte_fallback": bool(model.get("byte_fallback")),
        "charsmap": charsmap,
        "normalizer": steps,
        **_read_pre_tokenizer(path, state.get("pre_tokenizer")),
    }
    named = {"unk_token": vocab[unk_id], "cls_token": template.cls_token, "sep_token": template.sep_token}
    return UnigramFile(vocab, options, template.pairs, named, mark, drops_first)


def _read_vocab(path: Path, entries: list[Any]) -> tuple[list[str], list[float]]:
    pieces: dict[str, int] = {}
    scores = []
    for place, entry in enumerate(entries):
        is_pair = isinstance(entry, list) and len(entry) == 2
        if not (is_pair and isinstance(entry[0], str) and type(entry[1]) in (int, float)):
            raise ValueError(
                f"{path}: model: vocab[{place}]: expected a piece and its score, got {reprlib.repr(entry)}"
            )
        if pieces.setdefault(entry[0], place) != place:
            first = pieces[entry[0]]
            raise ValueError(f"{path}: model: vocab[{place}]: the piece {entry[0]!r:.80} stands at {first} already")
        scores.append(float(entry[1]))
    return list(pieces), scores


def _as_read(score: float) -> float:
    """What the library's JSON reader makes of this number, written with as few digits as tell it from others.

    The digits are taken for an integer and divided by a power of ten, and each of the two is rounded; the last bit may
    differ from the number's, and with it which of two ways with equal sums of scores is the better one.
    """
    if not math.isfinite(score):
        return score
    digits, _, exponent = repr(abs(score)).partition("e")
    whole, _, decimals = digits.partition(".")
    value, power = float(int(whole + decimals)), int(exponent or 0) - len(decimals)
    if power < -308:
        value, power = value / 1e308, power + 308
    value = value * float(f"1e{power}") if power >= 0 else value / float(f"1e{-power}")
    return math.copysign(value, score)


def _read_normalizer(path: Path, normalizer: Any) -> tuple[bytes, tuple[tuple[Any, ...], ...]]:
    charsmap, steps = b"", list[tuple[Any, ...]]()
    for name, part in _parts(path, "normalizer", normalizer, "normalizers"):
        kind = type_of(part)
        if kind == "Precompiled":
            if charsmap:
                raise ValueError(f"{path}: {name}: expected one Precompiled normalizer, got a second one")
            check_kinds(path, {"precompiled_charsmap": None, **part}, {"precompiled_charsmap": TEXT}, f"{name}: ")
            try:
                charsmap = base64.b64decode(part["precompiled_charsmap"], validate=True)
            except (binascii.Error, ValueError):
                raise ValueError(f"{path}: {name}: precompiled_charsmap: expected base64") from None
            if not charsmap:
                raise ValueError(f"{path}: {name}: precompiled_charsmap: expected a character map, got nothing")
            steps.append(("charsmap",))
        elif kind == "Strip":
            check_kinds(path, {"strip_left": None, "strip_right": None, **part}, _STRIP, f"{name}: ")
            steps.append(("strip", part["strip_left"], part["strip_right"]))
        elif kind == "Replace":
            check_kinds(path, {"content": None, **part}, _REPLACE, f"{name}: ")
            steps.append(_read_replace(path, name, part.get("pattern"), part["content"]))
        elif kind == "Lowercase":
            steps.append(("lowercase",))
        elif kind == "NFC":
            steps.append(("compose",))
        else:
            raise ValueError(f"{path}: {name}: expected Precompiled, Strip, Replace, NFC or Lowercase, got {kind}")
    return charsmap, tuple(steps)


def _read_replace(path: Path, name: str, pattern: Any, content: str) -> tuple[Any, ...]:
    if isinstance(pattern, dict) and list(pattern) == ["String"] and isinstance(pattern["String"], str):
        if pattern["String"]:
            return ("replace", pattern["String"], content)
    elif isinstance(pattern, dict) and list(pattern) == ["Regex"] and isinstance(pattern["Regex"], str):
        regex = pattern["Regex"]
        least = regex.removeprefix(" {").removesuffix(",}")
        if regex == f" {{{least},}}" and least.isascii() and least.isdigit() and 1 <= int(least) <= _LEAST_SPACES:
            return ("replace_spaces", int(least), content)
        if regex == " +":
            return ("replace_spaces", 1, content)
        if regex == _WHITESPACE:
            return ("replace_whitespace", content)
    raise ValueError(
        f"{path}: {name}: pattern: expected a String, a Regex of spaces alone such as ' {{2,}}', or the Regex "
        f"{_WHITESPACE!r}, got {reprlib.repr(pattern)}"
    )


def _read_pre_tokenizer(path: Path, pre_tokenizer: Any) -> dict[str, Any]:
    parts = list(_parts(path, "pre_tokenizer", pre_tokenizer, "pretokenizers"))
    kinds = [type_of(part) for _, part in parts]
    if kinds[-1:] != ["Metaspace"] or kinds[:-1] not in ([], ["WhitespaceSplit"], ["Punctuation"]):
        found = ", ".join(kinds) or None
        raise ValueError(
            f"{path}: pre_tokenizer: expected Metaspace, alone or behind WhitespaceSplit or Punctuation, got {found}"
        )
    name, first = parts[0]
    if kinds[0] == "Punctuation" and first.get("behavior", "Isolated") != "Isolated":
        raise ValueError(f"{path}: {name}: behavior: expected 'Isolated', got {reprlib.repr(first['behavior'])}")
    name, metaspace = parts[-1]
    return {
        "whitespace_split": kinds[0] == "WhitespaceSplit",
        "split_punctuation": kinds[0] == "Punctuation",
        **_metaspace(path, name, metaspace),
        "split": metaspace.get("split") is not False,
    }


def _metaspace(path: Path, name: str, part: Mapping[str, Any]) -> dict[str, Any]:
    check_kinds(path, {"replacement": None, **part}, _METASPACE, f"{name}: ")
    scheme = part.get("prepend_scheme", "always")
    if part.get("add_prefix_space") is False:  # how older files say it
        if part.get("prepend_scheme") not in (None, "never"):
            raise ValueError(f"{path}: {name}: add_prefix_space is false and prepend_scheme is {scheme!r}")
        scheme = "never"
    return {"replacement": part["replacement"], "prepend": scheme}


def _read_decoder(path: Path, decoder: Any) -> tuple[str | None, bool]:
    if decoder is None:
        return None, False
    if type_of(decoder) != "Metaspace":
        raise ValueError(f"{path}: decoder: expected Metaspace, got {type_of(decoder)}")
    options = _metaspace(path, "decoder", decoder)
    return options["replacement"], options["prepend"] != "never"


def _parts(path: Path, name: str, part: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a part, sequences in sequences flattened, each with its name for messages."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError(f"{path}: {name}: expected an object, got {reprlib.repr(part)}")
    if type_of(part) != "Sequence":
        yield name, part
        return
    check_kinds(path, {key: None, **part}, {key: LIST}, f"{name}: ")
    for place, inner in enumerate(part[key]):
        if inner is None:
            raise ValueError(f"{path}: {name}[{place}]: expected an object, got None")
        yield from _parts(path, f"{name}[{place}]", inner, key)
