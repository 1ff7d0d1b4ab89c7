r"""Texts with the results of Hugging Face `tokenizers` for Unigram models, in a file as fuzz_file.py writes it.

    python -m tests.tokenization.unigram_fuzz_file write FILE [--texts N]
    python -m tests.tokenization.unigram_fuzz_file check FILE [--some]

What stands before the texts of a block, behind the magic "unigram texts 1\n" at the start of the file:

    name, the tokenizer.json (strings); unk_id (array of one)
    byte_fallback, whitespace_split, split, split_punctuation (uint8 each)
    replacement, prepend (strings); the character map (string); number of steps (array of one)
    each step: kind, two strings, and two numbers (array): charsmap; strip (left, right); replace (pattern, content);
    replace_spaces (content; least); replace_whitespace (content); lowercase; compose
    number of added tokens (array of one); each as in fuzz_file.py
    vocabulary: array of ends, then one string of all pieces; scores (string of float64)
"""

import json
import random
import struct
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bert_fast.testing import charsmap
from bert_fast.tokenization import unigram_file
from bert_fast.tokenization.unigram_file import read_unigram

from . import fuzz_file, fuzz_grammar, native_core, unigram_core
from .fuzz_file import (
    Format,
    read_added,
    read_array,
    read_string,
    read_strings,
    write_added,
    write_array,
    write_string,
    write_strings,
)
from .fuzz_grammar import SCRIPTS, Setting, script_word
from .unigram_core import MARK, SPECIAL, Piece, added_token, forms, make_engine, make_library, make_state

MAGIC = b"unigram texts 1\n"
FULL_FILE = fuzz_file.ROOT / "build" / "fuzz" / "unigram.bin"  # where the check runner puts the file with all texts
NUM_TEXTS = 1_000_000  # of the grammar; code points and real texts come on top
SWITCHES = ("byte_fallback", "whitespace_split", "split", "split_punctuation")
CONTENTS = ("<e1>", "<E1>", "a-b", "x y", " q", "q ", "É_", "\u2581z", "<mask", "\ufb01n")  # no model has these pieces


@dataclass
class UnigramSetting(Setting):
    """One tokenizer: the object of its tokenizer.json; the other fields are what the grammar draws on."""

    state: dict[str, Any] = field(default_factory=dict)

    def make_library(self) -> Any:
        return make_library(self.state)

    def make_ours(self) -> Any:
        return make_engine(self.state)


def make_setting(name: str, state: dict[str, Any], **flags: bool) -> UnigramSetting:
    in_order = sorted(state["added_tokens"], key=lambda token: (not token["special"], token["id"]))
    names = ("content", "id", "single_word", "lstrip", "rstrip", "normalized")
    added = [tuple(token[name] for name in names) for token in in_order]
    vocab = [piece for piece, _ in state["model"]["vocab"]]
    return UnigramSetting(name, vocab, {"continuing_prefix": MARK, "added_tokens": added}, **flags, state=state)


def random_pieces(rng: random.Random) -> list[Piece]:
    """A few hundred pieces of a few scripts, half of them at the start of a word; many scores are equal."""
    alphabet = "".join(rng.choices(tuple(SCRIPTS.values()), k=3)) + "ababcde" * 3
    pieces: dict[str, float] = {}

    def add(piece: str) -> None:
        piece = piece.replace(" ", MARK)
        if piece and piece not in (*SPECIAL, "<mask>"):
            pieces.setdefault(piece, -rng.randint(1, 14) / rng.choice((1, 1, 1, 3)))

    if rng.random() < 0.7:  # few characters are unknown
        for c in [*alphabet, *unicodedata.normalize("NFKC", alphabet), MARK]:
            add(c)
    stems = ["", *(script_word(rng) for _ in range(12))]
    for _ in range(rng.choice((1, 5, 40, 300, 800))):
        piece = rng.choice(stems)[: rng.randint(0, 12)] + "".join(rng.choices(alphabet, k=rng.randint(0, 3)))
        add(rng.choice((MARK, MARK, "", "", MARK * 2)) + rng.choice((piece, unicodedata.normalize("NFKC", piece))))
    return list(pieces.items())


def byte_pieces(rng: random.Random) -> list[Piece]:
    """The tokens of bytes, of one in three settings not all."""
    lost = rng.choice((0, 0, 0.02))
    return [(f"<0x{byte:02X}>", -float(rng.randint(3, 20))) for byte in range(256) if rng.random() >= lost]


def random_added(rng: random.Random, size: int, only_special: bool) -> list[dict[str, Any]]:
    """XLM-R's own added tokens, and some more with any switches."""
    added = [added_token(token, place) for place, token in enumerate(SPECIAL)]
    added.append(added_token("<mask>", size - 1, lstrip=True))
    if only_special:
        return added
    # Not together: the library panics where two tokens take the same whitespace.
    strips = rng.random() < 0.5
    contents = [content for content in CONTENTS if not strips or content == content.strip()]
    for content in rng.sample(contents, rng.randint(1, 4)):
        switches = {"lstrip": strips and rng.random() < 0.4, "rstrip": strips and rng.random() < 0.4}
        switches |= {"single_word": rng.random() < 0.3, "normalized": rng.random() < 0.4}
        added.append(added_token(content, size + len(added) - 5, special=False, **switches))
    return added


def fuzzed_settings(seed: int) -> list[UnigramSetting]:
    """Each form with and without byte tokens and added ones, with broken bytes and texts with seams."""
    rng = random.Random(f"{seed} unigram")
    settings = []
    for k, (name, form) in enumerate(forms().items()):
        for fallback in (False, True):
            for more_added in (False, True):
                pieces = random_pieces(rng) + (byte_pieces(rng) if fallback else [])
                state = make_state(pieces, form, byte_fallback=fallback)
                state["added_tokens"] = random_added(rng, len(state["model"]["vocab"]), not more_added)
                kind = f"{name}{', bytes' * fallback}{', added tokens' * more_added}"
                settings.append(make_setting(kind, state, broken=(k + fallback) % 3 == 2))
        pieces = [(piece, -float(rng.randint(2, 9))) for piece in seam_pieces()]
        settings.append(make_setting(f"{name}, seams", make_state(pieces, form), seams=True))
    return settings


def seam_pieces() -> list[str]:
    """Pieces of the lengths at which words stop being kept, and what the seams of the grammar are made of."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[:n] for n in (1, 2, 3, 7, 8, 9, 15, 16, 18, 19, 20, 22, 23, 24, 25)]
    words += ["é", "中", "😀", "aB", "c!", ",", MARK, MARK * 2]
    return list(dict.fromkeys([*words, *(MARK + word for word in words)]))


def every_code_point() -> list[tuple[Setting, list[bytes]]]:
    """Every code point alone, in words, beside marks and joiners; pieces of what each becomes."""
    everywhere = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    known = {c: -float(4 + ord(c) % 5) for c in everywhere[:0x3400] if not c.isspace()}
    pieces = [*known.items(), ("a" + MARK, -3.0), (MARK + "a", -2.0), ("ab", -3.5), (MARK, -4.0)]
    pieces = list(dict(pieces).items())
    short, full = "a{0}b {0} ", "{0}\u0301 a{0}\u0301 \u200d{0}\u200d{0} \u0915\u094d{0}b {0}\ufe0f\r\n{0}\u1161 "

    def texts(shape: str, code_points: Sequence[str], per_text: int) -> list[bytes]:
        parts = [shape.format(c) for c in code_points]
        return ["".join(parts[i : i + per_text]).encode() for i in range(0, len(parts), per_text)]

    found: list[tuple[Setting, list[bytes]]] = []
    for name in ("xlm-r", "bge-m3", "deberta", "deberta, lower and words"):
        setting = make_setting(f"every code point, {name}", make_state(pieces, forms()[name]))
        special = [c for c in everywhere if ord(c) < 0x3400 or unicodedata.category(c)[0] in "CMPSZ"]
        special = [c for c in special if unicodedata.category(c) not in ("Co", "Cn") or ord(c) % 64 == 0]
        plan = texts(short, everywhere, 256) + texts(full, special, 32) + texts("{0}", special, 1)
        found.append((setting, plan))
    return found


def real_texts(data: Path) -> list[tuple[Setting, list[bytes]]]:
    """Every line of every text file, with pieces that the library's trainer finds in some of them."""
    if not data.is_dir():
        return []
    lines = [*native_core.read_corpus(data), *native_core.read_books(data), *native_core.read_labelled_texts(data)]
    texts = [line.encode() for line in dict.fromkeys(lines)]
    found: list[tuple[Setting, list[bytes]]] = []
    for name in ("xlm-r", "bge-m3", "deberta"):
        state = make_state(unigram_core.trained_pieces(data), forms()[name])
        found.append((make_setting(f"real texts, {name}", state), texts))
    return found


def plan_blocks(num_texts: int, seed: int) -> list[tuple[Setting, list[bytes] | int]]:
    """Settings with their texts, or with the number of texts to make."""
    settings = fuzzed_settings(seed)
    num_seams = sum(setting.seams for setting in settings)
    seam_count = min(num_texts // 1000, 1000)  # these are fifty times as long
    count = -(-(num_texts - num_seams * seam_count) // (len(settings) - num_seams))
    plans: list[tuple[Setting, list[bytes] | int]] = [
        (setting, seam_count if setting.seams else count) for setting in settings
    ]
    if num_texts >= NUM_TEXTS:
        plans += [*every_code_point(), *real_texts(fuzz_file.DATA)]
    return plans


def write_setting(setting: Setting) -> bytes:
    assert isinstance(setting, UnigramSetting)
    file = read_unigram(Path("tokenizer.json"), setting.state)
    options = file.engine_options
    parts = [write_string(setting.name.encode()), write_string(json.dumps(setting.state).encode())]
    parts += [write_array([options["unk_id"]]), bytes(options[name] for name in SWITCHES)]
    parts += [write_string(options[name].encode()) for name in ("replacement", "prepend")]
    parts += [write_string(options["charsmap"]), write_array([len(options["normalizer"])])]
    for kind, *fields in options["normalizer"]:
        strings = [value for value in fields if isinstance(value, str)]
        numbers = [int(value) for value in fields if not isinstance(value, str)]
        parts += [write_string(value.encode()) for value in (kind, *[*strings, "", ""][:2])]
        parts.append(write_array([*numbers, 0, 0][:2]))
    parts += [*write_added(setting), *write_strings([piece.encode() for piece in file.vocab])]
    scores = struct.pack(f"<{len(file.vocab)}d", *options["scores"])
    return b"".join([*parts, write_string(scores)])


def read_setting(file: BinaryIO) -> Setting:
    name, state = read_string(file).decode(), json.loads(read_string(file))
    read_array(file)
    file.read(len(SWITCHES))
    for _ in range(3):
        read_string(file)
    for _ in range(int(read_array(file)[0])):
        for _ in range(3):
            read_string(file)
        read_array(file)
    read_added(file)
    read_strings(file)
    read_string(file)
    return make_setting(name, state)


_MODULES = (fuzz_grammar, native_core, unigram_core, charsmap, unigram_file)
_SOURCES = (__file__, *(str(module.__file__) for module in _MODULES))
UNIGRAM = Format(MAGIC, NUM_TEXTS, _SOURCES, plan_blocks, write_setting, read_setting)

if __name__ == "__main__":
    sys.exit(fuzz_file.main(UNIGRAM))
