"""Random vocabularies, options and texts on which tokenizers could disagree: the grammar behind the fuzz tests.

A text is a row of fragments drawn from a pool that each setting fills for itself: pieces of its own vocabulary, whole,
joined, cut and spoilt, so that most words are looked up in vain or nearly; words of a dozen scripts; runs of one class
of characters; marks, invisible characters and code points from anywhere. Lengths lean to those at which a tokenizer of
blocks changes its ways: 15 to 17 and 63 to 65 bytes, 99 to 101 code points. All follows from a seed.
"""

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .native_core import make_hugging_face, make_native, read_vocab

VOCABULARIES = ("bert-base-uncased", "bert-base-cased", "bert-base-chinese", "bert-base-multilingual-cased")

# A tokenizer that reads a text in blocks and chunks has its seams near multiples of these, in bytes or code points.
BLOCKS = (16, 32, 64)
CHUNKS = (2048, 4096, 8192)

SCRIPTS = {
    "lower": "abcdefghijklmnopqrstuvwxyz",
    "upper": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "few": "aabbcABe",
    "ascii": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "latin": "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿĀāĂăĞğİıŁłŐőŒœŠšŽžßẞǅǆẞÀÉÎ",
    "decomposed": "aeiou\u0300\u0301\u0302\u0308\u0323\u0327\u0334",
    "vietnamese": "ấầẩẫậắằẳẵặếềểễệốồổỗộớờởỡợứừửữựẤỆ",
    "greek": "αβγδεζηθΑΒΓΔΕΣσςάέήΐΰώϊϋἀἂᾳᾼὈ\u0345",
    "cyrillic": "абвгдежзийклмнАБВГДЙЁёЇї\u0306\u0308",
    "hebrew": "אבגדהוזחט\u05b0\u05b4\u05bcשׁיִ",
    "arabic": "ابتثجحخد\u064b\u064e\u0651\u0670أإآۀ",
    "devanagari": "कखगघङचछज\u093c\u093f\u0941\u094d\u0902क़\u200d",
    "thai": "กขคงจฉ\u0e31\u0e34\u0e38\u0e48\u0e49",
    "hangul": "가각간갇힣한국어뷁ᄀ까ᅢᆨᆩ",
    "kana": "あいうえおがぎぐアイウエオガギグ\u3099ｱｶﾞー",
    "han": "中国文字一二三\u3400\u4dbf\U00020000\U0002a6d6\uf900\ufa0e\U0002f800\U0002b820",
    "emoji": "😀🎉👍🏽👩\u200d💻❤\ufe0f🇩🇪#\ufe0f\u20e3",
    "wide": "ＡＢａｂ０１𝐀𝐚𝔄𝒜𐐀𐐨𞤀𞤢",
    "music": "\U0001d15e\U0001d160\U0001d165\U0001d16d\U0001d157\u0334",
    "digits": "0123456789",
}
SPACES = (" ", " ", " ", " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\u00a0", "\u1680")
SPACES += ("\u2003", "\u2028", "\u2029", "\u202f", "\u3000")
INVISIBLE = (
    "\0",
    "\x01",
    "\x7f",
    "\x80",
    "\u00ad",
    "\u061c",
    "\u200b",
    "\u200d",
    "\u2060",
    "\ufeff",
    "\ufffd",
    "\ue000",
)
INVISIBLE += ("\U000e0001", "\U000e0100", "\ufe0f", "\ufff9", "\U0010ffff", "\x1b")
MARKS = ("\u0300", "\u0301", "\u0323", "\u0334", "\u0345", "\u0344", "\u034f", "\u05b0", "\u064b", "\u093c", "\u0e38")
MARKS += ("\u0f71", "\u0f73", "\u302a", "\u3099", "\u20d0", "\u0903", "\U0001d165", "\U0001d16d", "\u0dca")
PUNCTUATION = (
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "…",
    "—",
    "«",
    "»",
    "“",
    "”",
    "、",
    "。",
    "！",
    "·",
    "¿",
    "§",
    "€",
    "×",
)
PUNCTUATION += ("\u037e", "\u0387", "\u1fef", "\u2260", "\u226e", "\u3030", "\U00010100", "\U0001f600")
LENGTHS = (1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 17, 18, 31, 33)
LONG_LENGTHS = (47, 48, 49, 63, 64, 65, 66, 98, 99, 100, 101, 102, 127, 129, 200)


@dataclass
class Setting:
    """One tokenizer: a vocabulary and the options that `make_native` and `make_hugging_face` take."""

    name: str
    vocab: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    broken: bool = False  # its texts are bytes with invalid UTF-8 in them
    seams: bool = False  # its texts are long, with something at the end of a block or chunk

    @property
    def prefix(self) -> str:
        return str(self.options.get("continuing_prefix", "##"))

    def make_library(self) -> Any:
        return make_hugging_face(self.vocab, **self.options)

    def make_ours(self) -> Any:
        return make_native(self.vocab, **self.options)


def any_code_point(rng: random.Random) -> str:
    """Of any plane, low ones more often; never a surrogate."""
    code_point = rng.randrange(rng.choice((0x80, 0x250, 0x800, 0x3100, 0x11000, 0x20000, 0x110000)))
    return "\ufffd" if 0xD800 <= code_point < 0xE000 else chr(code_point)


def script_word(rng: random.Random) -> str:
    alphabet = SCRIPTS[rng.choice(tuple(SCRIPTS))]
    return "".join(rng.choices(alphabet, k=rng.choice(LONG_LENGTHS if rng.random() < 0.03 else LENGTHS)))


def spoil(rng: random.Random, word: str) -> str:
    """The word with something done to it that may matter: case, an accent, something in the middle or at an end."""
    place = rng.randint(0, len(word))
    match rng.randrange(9):
        case 0:
            return word.upper()
        case 1:
            return word.capitalize()
        case 2:
            return word[:place] + rng.choice(MARKS) + word[place:]
        case 3:
            return word[:place] + rng.choice(INVISIBLE) + word[place:]
        case 4:
            return word[:place] + any_code_point(rng) + word[place:]
        case 5:
            return word[:place]
        case 6:
            return word[:place] + rng.choice(PUNCTUATION) + word[place:]
        case 7:
            return word[:place] + rng.choice(SCRIPTS["few"]) + word[place:]
        case _:
            return word[place:] + word[:place]


def make_pool(rng: random.Random, setting: Setting, size: int = 2500) -> list[str]:
    """The fragments that the texts of a setting are made of."""
    prefix = setting.prefix
    pieces = [token.removeprefix(prefix) for token in rng.choices(setting.vocab, k=600)] + ["a", "[UNK]"]
    added = [token[0] for token in setting.options.get("added_tokens", ())]

    def joined(rng: random.Random) -> str:
        return "".join(rng.choices(pieces, k=rng.choice((1, 1, 2, 2, 3, 5))))

    def added_token(rng: random.Random) -> str:
        token = rng.choice(added) if added else rng.choice(("[MASK]", "[CLS]", "[UNK]"))
        return rng.choice((token, token, token, " " + token, token + " ", token[:-1], token.upper(), token.lower()))

    productions: list[tuple[int, Callable[[random.Random], str]]] = [
        (18, lambda rng: " "),
        (22, joined),
        (16, lambda rng: spoil(rng, joined(rng))),
        (16, script_word),
        (4, lambda rng: rng.choice(SPACES) * rng.choice((1, 1, 1, 2, 5, 16, 17))),
        (8, lambda rng: rng.choice(PUNCTUATION) * rng.choice((1, 1, 1, 1, 3, 16))),
        (4, lambda rng: "".join(rng.choices(MARKS, k=rng.choice((1, 1, 2, 3))))),
        (4, lambda rng: rng.choice(INVISIBLE) * rng.choice((1, 1, 1, 2, 17))),
        (4, lambda rng: any_code_point(rng)),
        (4 + 8 * bool(added), added_token),
    ]
    weights = [weight for weight, _ in productions]
    return [make(rng) for _, make in rng.choices(productions, weights, k=size)]


def make_texts(setting: Setting, count: int, seed: int) -> Iterator[bytes]:
    """`count` texts as UTF-8; of a `broken` setting with bytes lost, changed or put in."""
    rng = random.Random(f"{seed} {setting.name}")
    if setting.seams:
        yield from (text.encode() for text in seam_texts(rng, setting, count))
        return
    pool = make_pool(rng, setting)
    sizes = rng.choices((0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 60), (1, 5, 8, 8, 8, 6, 5, 4, 3, 2, 0.2), k=count)
    for size in sizes:
        text = "".join(rng.choices(pool, k=size)).encode()
        yield break_bytes(rng, text) if setting.broken else text


def break_bytes(rng: random.Random, text: bytes) -> bytes:
    broken = bytearray(text)
    for _ in range(rng.randint(0, 4)):
        place = rng.randint(0, len(broken))
        match rng.randrange(4):
            case 0:
                del broken[place : place + 1]
            case 1:
                broken[place:place] = bytes(rng.choices(range(0x80, 0x100), k=rng.randint(1, 3)))
            case 2:
                broken[place : place + 1] = bytes([rng.randrange(256)])
            case _:
                del broken[place:]
    return bytes(broken)


def seam_texts(rng: random.Random, setting: Setting, count: int) -> Iterator[str]:
    """Something worth seeing starts a few bytes before the end of a block or chunk; other text before and behind."""
    pool = make_pool(rng, setting, 600)
    fillers = ["a", " ", "ab ", "a, ", "é", "中", "é a ", "中a", "\u0301", "\u200b", "😀 ", "aB c! é 中"]
    for _ in range(count):
        seam = rng.choice(BLOCKS) * rng.randint(1, 8) if rng.random() < 0.6 else rng.choice(CHUNKS)
        feature = rng.choice(pool) + rng.choice(pool)
        filler = rng.choice(fillers)
        start = seam - rng.randint(0, min(seam, len(feature.encode()) + 2))
        if rng.random() < 0.7:  # counted in bytes, else in code points
            before = (filler * (start // len(filler.encode()) + 1)).encode()[:start].decode(errors="ignore")
            before += "a" * (start - len(before.encode()))
        else:
            before = (filler * (start // len(filler) + 1))[:start]
        yield (
            before
            + feature
            + rng.choice(("", "", "a", " ", rng.choice(pool), rng.choice(fillers) * rng.randint(1, 70)))
        )


# --- settings ---------------------------------------------------------------------------------------------------------


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "lowercase": rng.random() < 0.6,
        "strip_accents": rng.choice((None, None, True, False)),
        "handle_chinese_chars": rng.random() < 0.7,
        "clean_text": rng.random() < 0.75,
        "max_word_chars": rng.choice((100, 100, 100, 100, 0, 1, 3, 15, 16, 17, 64, 300)),
    }


def random_vocab(rng: random.Random, prefix: str) -> list[str]:
    """A few hundred tokens that share beginnings; words, continuing pieces, or mostly one of these."""
    continuing = rng.choice((0.5, 0.5, 0.8, 0.1, 1.0))
    alphabet = "".join(rng.choices(tuple(SCRIPTS.values()), k=3)) + "ababcde" * 3
    stems = ["", *(script_word(rng) for _ in range(12)), *("".join(rng.choices(alphabet, k=n)) for n in (2, 9, 15, 16))]
    tokens = ["[UNK]", "[MASK]"]
    if rng.random() < 0.8:  # every character is a piece, so that few words are unknown
        used = alphabet + "".join(stems)
        pieces = [*used, *used.lower(), *unicodedata.normalize("NFD", used.lower())]
        tokens += [*pieces, *(prefix + piece for piece in pieces)]
    for _ in range(rng.choice((1, 5, 40, 300, 800))):
        token = rng.choice(stems)[: rng.randint(0, 24)] + "".join(rng.choices(alphabet, k=rng.randint(0, 3)))
        token = rng.choice((token, token.lower(), unicodedata.normalize("NFD", token.lower()), spoil(rng, token)))
        tokens.append(prefix + token if rng.random() < continuing else token)
    return list(dict.fromkeys(tokens))


def random_added_tokens(rng: random.Random, vocab: Sequence[str], options: dict[str, Any]) -> list[tuple]:
    """Added tokens with every combination of switches; normalized ones differ from each other once normalized."""
    contents = ["[MASK]", "[CLS]", "<s>", "<S>", "ab", "AB", "É", "é", "a b", "x ", " x", "中a", "a", "_", "\t", "İ"]
    contents += ["b\u0301", "中", "aa", "[", "\u0301", "Straße"]
    normalize = make_hugging_face(["[UNK]"], **options).normalizer.normalize_str
    taken, added, next_id = {""}, [], len(vocab)
    only_raw = rng.random() < 0.5
    # Not together: the library panics where two tokens take the same whitespace.
    strips = rng.random() < 0.6
    contents = [content for content in contents if not strips or content == content.strip()]
    for content in rng.sample(contents, rng.randint(1, 7)):
        normalized = not only_raw and rng.random() < 0.4
        if normalized and normalize(content) in taken:
            continue
        if normalized:
            taken.add(normalize(content))
        token_id = vocab.index(content) if content in vocab else next_id
        next_id += token_id == next_id
        switches = (rng.random() < 0.3, strips and rng.random() < 0.4, strips and rng.random() < 0.4)
        added.append((content, token_id, *switches, normalized))
    return added


def seam_vocab(prefix: str = "##") -> list[str]:
    """Words and pieces of every length around the sizes of keys and registers, many with the same first 16 bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz" * 12
    words = [letters[:n] for n in (1, 2, 3, 7, 8, 9, 14, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65, 99, 100, 101)]
    words += [letters[:15] + c for c in "qrs"] + [letters[:16] + c for c in "xyz"] + [letters[:16] + "qq"]
    words += ["é" * n for n in (1, 7, 8, 9, 32, 100)] + ["中" * n for n in (1, 5, 6)] + ["😀" * n for n in (1, 3, 4, 5)]
    words += [letters[:14] + "é", letters[:15] + "é", letters[:13] + "中", letters[:14] + "中", "é" + letters[:14]]
    pieces = [*letters[:26], "é", "中", "😀", letters[16:18], letters[15:31], letters[16:32], letters[17:100], "é" * 50]
    return list(dict.fromkeys(["[UNK]", *words, *(prefix + piece for piece in [*pieces, *words[:12]])]))


def huge_vocab(rng: random.Random) -> list[str]:
    """200,000 tokens, most of them short: tables are as full as they get."""
    tokens = {"[UNK]": None}
    while len(tokens) < 200_000:
        token = "".join(
            rng.choices("abcdefghijklmnopqrstuvwxyz0123456789éß中", k=rng.choice((2, 3, 4, 4, 5, 6, 9, 15, 16)))
        )
        tokens["##" + token if rng.random() < 0.4 else token] = None
    return list(tokens)


# Tokens that no word can be, beside some that words are: spaces, controls, upper case, punctuation among letters.
IMPOSSIBLE = [
    "[UNK]",
    "a",
    "b",
    "##a",
    "##b",
    "",
    "##",
    " ",
    "a b",
    " a",
    "a ",
    "\0",
    "a\0",
    "##\0",
    "A",
    "Ab",
    "##B",
    "a,b",
]
IMPOSSIBLE += [
    "\t",
    "\u2028",
    "##\u2028",
    "e\u0301",
    "é",
    "##é",
    "##\u0301",
    "\u0301",
    "中国",
    "中",
    "##中",
    "\u200b",
    "a\u200b",
]
IMPOSSIBLE += [
    "!",
    "!!",
    "##!",
    "İ",
    "i\u0307",
    "##\u0307",
    "가",
    "\u1100\u1161",
    "ẞ",
    "ss",
    "ß",
    "\ufffd",
    "\ue000",
    "##\ue000",
]


def make_settings(data: Path, seed: int) -> list[Setting]:
    """About a hundred settings. Without `data` (the folder of real vocabularies) those of real ones are left out."""
    rng = random.Random(seed)
    mask = ("[MASK]", len(seam_vocab()), False, True, True, False)
    settings = [
        Setting("one token", ["[UNK]"]),
        Setting("impossible tokens", IMPOSSIBLE),
        Setting("impossible tokens, nothing cleaned", IMPOSSIBLE, {"clean_text": False, "lowercase": False}),
        Setting("impossible tokens, controls kept", IMPOSSIBLE, {"clean_text": False}),
        Setting("200,000 tokens", huge_vocab(rng)),
        Setting("words of block lengths", seam_vocab()),
        Setting("words of block lengths, cased", seam_vocab(), {"lowercase": False}),
        Setting("seams", seam_vocab(), seams=True),
        Setting("seams, cased, controls kept", seam_vocab(), {"lowercase": False, "clean_text": False}, seams=True),
        Setting("seams, no prefix", seam_vocab(""), {"continuing_prefix": "", "strip_accents": False}, seams=True),
        Setting("seams, added tokens", seam_vocab(), {"added_tokens": [mask]}, seams=True),
        *(Setting(f"broken bytes {k}", random_vocab(rng, "##"), random_options(rng), broken=True) for k in range(5)),
    ]
    for k in range(45):
        prefix = rng.choice(("##", "##", "##", "", "a", "#", "é", "@@", "中", "\u0301", " ", "A"))
        options = random_options(rng) | {"continuing_prefix": prefix}
        settings.append(Setting(f"random vocabulary {k}", random_vocab(rng, prefix), options))
    for k in range(20):
        vocab, options = random_vocab(rng, "##"), random_options(rng)
        added = random_added_tokens(rng, vocab, options)
        settings.append(Setting(f"added tokens {k}", vocab, options | {"added_tokens": added}))
    if not data.is_dir():
        return settings
    for name in VOCABULARIES:
        vocab = read_vocab(data, name)
        special = [(token, vocab.index(token), False, False, False, False) for token in ("[CLS]", "[SEP]", "[MASK]")]
        own = {"lowercase": name.endswith(("uncased", "chinese")), "added_tokens": special}
        for k, change in enumerate(({}, {}, {"strip_accents": not own["lowercase"]}, {"clean_text": False})):
            settings.append(Setting(f"{name} {k}", vocab, own | change))
        settings.append(
            Setting(f"{name}, all changed", vocab, {"lowercase": not own["lowercase"], "handle_chinese_chars": False})
        )
        settings.append(Setting(f"{name}, seams", vocab, own, seams=True))
    return settings
