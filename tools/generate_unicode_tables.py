#!/usr/bin/env python3
"""Writes the Unicode tables of the tokenizer by asking Hugging Face `tokenizers` about every code point.

The truth that bert_fast follows is that library's BertNormalizer and BertPreTokenizer, and these carry Unicode tables
of several ages (categories from about Unicode 8, decompositions and lower-case forms newer). Neither Python's
`unicodedata` nor a copy of the Unicode data files agrees with them everywhere, so every property is probed:

    whitespace, punctuation   what BertPreTokenizer removes or isolates in "a" + c + "b"
    control                   what BertNormalizer(clean_text) removes
    cjk                       what BertNormalizer(handle_chinese_chars) puts spaces around
    mark                      what BertNormalizer(strip_accents) removes (category Mn of its table)
    word                      what counts as a word character beside an added token with single_word=True
    nfd, lower                the NFD and Lowercase normalizers
    composed                  the NFC normalizer, on the decomposition of each character
    combining class           the order in which NFD leaves c and one mark of every known class

Run after a change of the library's version: `python tools/generate_unicode_tables.py`. It writes
csrc/wordpiece/unicode_tables.inc, csrc/unigram/composition_tables.inc and bert_fast/reference/_unicode_tables.py; tests
compare all of them with the library.
"""

import argparse
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0x110000
CODE_POINTS = [c for c in range(LIMIT) if not 0xD800 <= c <= 0xDFFF]
HANGUL = range(0xAC00, 0xD7A4)  # decomposed by arithmetic, so left out of the NFD map
BLOCK = 128  # code points per block of the two-stage table; the size with the smallest source among powers of two

# Bits of the flags in the C++ table, in this order.
FLAGS = ("whitespace", "control", "punctuation", "cjk", "mark", "word")


def of_changed_blocks(change: Callable[[str], object], form: str, *others: str) -> Iterator[int]:
    """Code points of which `change` may make something: those whose block, each in this form, it does not leave alone.

    Most code points are letters or nothing at all; the library is asked for 128 of these at once.
    """
    for start in range(0, len(CODE_POINTS), BLOCK):
        block = CODE_POINTS[start : start + BLOCK]
        texts = [each_in(one, block) for one in (form, *others)]
        if any(change(text) != text for text in texts):
            yield from block


def each_in(form: str, block: list[int]) -> str:
    """`form` with each of these code points in the place of {}, one after the other."""
    before, after = form.split("{}")
    return before + (after + before).join(map(chr, block)) + after


def bert_normalizer(**switches: bool) -> normalizers.BertNormalizer:
    """A BertNormalizer that does only what is switched on."""
    every = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), False)
    return normalizers.BertNormalizer(**(every | switches))


def probe_sets() -> dict[str, set[int]]:
    """The code points that have each boolean property of FLAGS."""
    sets: dict[str, set[int]] = {name: set() for name in FLAGS}
    clean = bert_normalizer(clean_text=True)
    chinese = bert_normalizer(handle_chinese_chars=True)
    strip = bert_normalizer(strip_accents=True)
    splitter = pre_tokenizers.BertPreTokenizer()

    def split(text: str) -> object:
        words = [word for word, _ in splitter.pre_tokenize_str(text)]
        return text if words == [text] else words

    for c in of_changed_blocks(split, "a{}b"):
        words = split(f"a{chr(c)}b")
        if words == ["a", "b"]:
            sets["whitespace"].add(c)
        elif words == ["a", chr(c), "b"]:
            sets["punctuation"].add(c)
        else:
            assert words == f"a{chr(c)}b", (c, words)
    for c in of_changed_blocks(clean.normalize_str, "a{}b"):
        text = f"a{chr(c)}b"
        cleaned = clean.normalize_str(text)
        if cleaned == "ab":
            sets["control"].add(c)
        elif cleaned == "a b":
            assert c in sets["whitespace"], c
        else:
            assert cleaned == text, c
    for c in of_changed_blocks(chinese.normalize_str, "a{}b"):
        spaced = chinese.normalize_str(f"a{chr(c)}b")
        if spaced != f"a{chr(c)}b":
            assert spaced == f"a {chr(c)} b", c
            sets["cjk"].add(c)
    for c in of_changed_blocks(strip.normalize_str, "a{}b"):
        if strip.normalize_str(f"a{chr(c)}b") == "ab":
            sets["mark"].add(c)
    # The library cleans whitespace to a space unless it is a control character; both facts together are its rule.
    for c in sets["whitespace"] - sets["control"]:
        assert clean.normalize_str(chr(c)) == " ", c
    sets["word"] = probe_word_characters(sets["whitespace"])
    return sets


def probe_word_characters(whitespace: set[int]) -> set[int]:
    """Code points before which a single_word token is not recognised; also checks what lstrip and rstrip take."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.add_tokens([AddedToken("x", single_word=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<", lstrip=True, rstrip=True, normalized=False)])
    x, bracket = tokenizer.token_to_id("x"), tokenizer.token_to_id("<")
    word = set()

    def found(form: str, block: list[int]) -> int:
        return tokenizer.encode(each_in(form, block)).ids.count(x)

    for start in range(0, len(CODE_POINTS), BLOCK):
        block = CODE_POINTS[start : start + BLOCK]
        in_brackets = tokenizer.encode("".join(f"{chr(c)}<{chr(c)}a" for c in block))
        spans = zip(in_brackets.ids, in_brackets.offsets, strict=True)
        strips = any(last - first > 1 for one, (first, last) in spans if one == bracket)
        counts = {found("{}x ", block), found("x{} ", block)}
        if start > 0 and not strips and whitespace.isdisjoint(block) and counts in ({0}, {len(block)}):
            word.update(block if counts == {0} else ())  # all alike
            continue
        for c in block:
            before, after = (tokenizer.encode(text).ids for text in (chr(c) + "x", "x" + chr(c)))
            if c in (ord("x"), ord("<")):
                if c == ord("x"):
                    word.add(c)
                continue
            assert (x in before) == (x in after), c
            if x not in before:
                word.add(c)
            stripped = tokenizer.encode(f"{chr(c)}<{chr(c)}").ids
            assert (len(stripped) == 1) == (c in whitespace), c
    return word


def probe_map(normalizer: normalizers.Normalizer) -> dict[int, str]:
    """Code points that the normalizer changes, with what they become."""
    change = normalizer.normalize_str
    return {c: mapped for c in of_changed_blocks(change, "a{}b") if (mapped := change(chr(c))) != chr(c)}


def probe_combining_classes(nfd: dict[int, str]) -> dict[int, int]:
    """Canonical combining classes as far as the library's NFD knows them.

    Two neighbouring marks are swapped iff 0 < class(second) < class(first). The numbers come from `unicodedata`, of
    which one old mark per class serves as a yardstick; the class of every code point is then measured.
    """
    normalize = normalizers.NFD().normalize_str
    greatest, second = "\u0345", "\u035d"  # classes 240 and 234

    def swaps(first: str, last: str) -> bool:
        return normalize(f"a{first}{last}") == f"a{last}{first}" and first != last

    yardstick = {240: greatest}
    for c in CODE_POINTS:
        value = unicodedata.combining(chr(c))
        if value and c not in nfd and swaps(greatest, chr(c)):  # the library may be too old to know a mark
            yardstick.setdefault(value, chr(c))
    classes = {}
    for c in of_changed_blocks(normalize, f"a{greatest}{{}}", f"a{{}}{second}"):
        if c in nfd or not (swaps(greatest, chr(c)) or swaps(chr(c), second)):
            continue
        # The class is the smallest yardstick class whose mark does not stay in front of a smaller one.
        not_smaller = [value for value, mark in yardstick.items() if not swaps(chr(c), mark) and mark != chr(c)]
        not_greater = [value for value, mark in yardstick.items() if not swaps(mark, chr(c)) and mark != chr(c)]
        both = [value for value in not_smaller if value in not_greater]
        value = both[0] if both else unicodedata.combining(chr(c))
        assert len(both) <= 1 and value > 0, (hex(c), both)
        classes[c] = value
    return classes


def check_context_free(lower: dict[int, str], nfd: dict[int, str]) -> None:
    """Lower-casing and decomposition act on one character at a time, whatever stands around it."""
    lowercase, decompose = normalizers.Lowercase().normalize_str, normalizers.NFD().normalize_str
    for c in lower:
        assert lowercase(f"A{chr(c)} A{chr(c)}b") == f"a{lower[c]} a{lower[c]}b", hex(c)
    for c in nfd:
        assert decompose(f"A{chr(c)}b") == f"A{nfd[c]}b", hex(c)


def probe_compositions(nfd: dict[int, str]) -> dict[tuple[int, int], int]:
    """Pairs of characters that NFC puts together, with what they become; Hangul is left to arithmetic."""
    compose = normalizers.NFC().normalize_str
    pairs = {}
    for c, decomposed in nfd.items():
        if len(decomposed) == 1 or compose(decomposed) != chr(c):
            continue
        first, second = compose(decomposed[:-1]), decomposed[-1]
        assert len(first) == 1 and compose(first + second) == chr(c), hex(c)
        pairs[ord(first), ord(second)] = c
    return pairs


def to_ranges(code_points: set[int]) -> list[tuple[int, int]]:
    """Sorted inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for c in sorted(code_points):
        if ranges and ranges[-1][1] == c - 1:
            ranges[-1] = (ranges[-1][0], c)
        else:
            ranges.append((c, c))
    return ranges


def wrap(words: list[str], indent: str, quote: bool, width: int = 118) -> str:
    """Joins words into lines of at most `width` characters; quoted lines become string literals that end in a space."""
    lines, line = [], ""
    for word in words:
        if line and len(indent) + len(line) + len(word) + 4 > width:
            lines.append(line)
            line = ""
        line += word + " "
    lines.append(line)
    return "\n".join(f'{indent}"{line}"' if quote else f"{indent}{line.rstrip()}" for line in lines)


def python_module(sets: dict[str, set[int]], lower: dict, nfd: dict, classes: dict[int, int], source: str) -> str:
    """The text of bert_fast/reference/_unicode_tables.py."""

    def ranges(name: str, doc: str) -> str:
        words = [f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in to_ranges(sets[name])]
        return f"# {doc}\n{name.upper()}: Ranges = _ranges(\n{wrap(words, '    ', True)}\n)\n"

    def mapping(name: str, table: dict[int, str], doc: str) -> str:
        words = [f"{c:X}>{'+'.join(f'{ord(m):X}' for m in mapped)}" for c, mapped in sorted(table.items())]
        return f"# {doc}\n{name}: dict[int, str] = _mapping(\n{wrap(words, '    ', True)}\n)\n"

    by_class: dict[int, set[int]] = {}
    for c, value in classes.items():
        by_class.setdefault(value, set()).add(c)
    class_words = [
        f"{value}:" + ",".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in to_ranges(members))
        for value, members in sorted(by_class.items())
    ]
    parts = [
        ranges("whitespace", "Separates words; becomes a space when text is cleaned (unless it is CONTROL)."),
        ranges("control", "Removed when text is cleaned; U+FFFD and NUL among them."),
        ranges("punctuation", "A word of its own."),
        ranges("cjk", "Gets a space on either side when Chinese characters are handled."),
        ranges("mark", "Removed after decomposition when accents are stripped."),
        ranges("word", "Word characters in the sense of added tokens with single_word=True."),
        mapping("LOWER", lower, "Lower-case forms, one character at a time (no final sigma)."),
        mapping("NFD", nfd, "Full canonical decompositions; Hangul syllables are computed, see HANGUL."),
        "# Canonical combining classes other than 0: NFD sorts each run of such characters by it, stably.\n"
        f"COMBINING_CLASS: dict[int, int] = _classes(\n{wrap_long(class_words)}\n)\n",
    ]
    return f'''"""Character properties as Hugging Face `tokenizers` sees them. Generated: do not edit.

{source}
Ranges are inclusive pairs of code points in ascending order.
"""

# fmt: off
Ranges = tuple[tuple[int, int], ...]

HANGUL: Ranges = ((0x{HANGUL[0]:X}, 0x{HANGUL[-1]:X}),)  # decomposed by arithmetic (Unicode standard, section 3.12)


def _range(word: str) -> tuple[int, int]:
    first, _, last = word.partition("-")
    return int(first, 16), int(last or first, 16)


def _ranges(words: str) -> Ranges:
    return tuple(_range(word) for word in words.split())


def _mapping(words: str) -> dict[int, str]:
    pairs = (word.split(">") for word in words.split())
    return {{int(key, 16): "".join(chr(int(value, 16)) for value in values.split("+")) for key, values in pairs}}


def _classes(words: str) -> dict[int, int]:
    pairs = (word.split(":") for word in words.split())
    spans = ((int(value), _range(item)) for value, items in pairs for item in items.split(","))
    return {{c: value for value, (first, last) in spans for c in range(first, last + 1)}}


{chr(10).join(parts)}'''


def wrap_long(words: list[str]) -> str:
    """Like wrap for words of the form "class:item,item" that can be longer than a line: repeats the class."""
    short = []
    for word in words:
        head, items = word.split(":")
        items = items.split(",")
        for start in range(0, len(items), 8):
            short.append(f"{head}:{','.join(items[start : start + 8])}")
    return wrap(short, "    ", True)


def cpp_table(sets: dict[str, set[int]], lower: dict, nfd: dict, classes: dict[int, int], source: str) -> str:
    """The text of csrc/wordpiece/unicode_tables.inc: code point -> block -> record -> properties."""
    pool: list[int] = []  # code points of all mappings, one after the other
    pool_index: dict[str, int] = {}

    def pooled(mapped: str | None) -> tuple[int, int]:
        if mapped is None:
            return 0, 0
        if mapped not in pool_index:
            pool_index[mapped] = len(pool)
            pool.extend(ord(m) for m in mapped)
        return pool_index[mapped], len(mapped)

    flags = [0] * LIMIT
    for bit, name in enumerate(FLAGS):
        for c in sets[name]:
            flags[c] |= 1 << bit
    records: dict[tuple[int, ...], int] = {}
    record_of = []
    for c in range(LIMIT):
        record = (flags[c], classes.get(c, 0), *pooled(nfd.get(c)), *pooled(lower.get(c)))
        record_of.append(records.setdefault(record, len(records)))
    blocks: dict[tuple[int, ...], int] = {}
    index = [
        blocks.setdefault(tuple(record_of[start : start + BLOCK]), len(blocks)) for start in range(0, LIMIT, BLOCK)
    ]
    assert len(records) < 1 << 16 and len(blocks) < 1 << 16 and len(pool) < 1 << 16

    def numbers(values: list[int]) -> str:
        return wrap([f"{value}," for value in values], "    ", False)

    record_words = ["{" + ",".join(map(str, record)) + "}," for record in records]
    flag_lines = "\n".join(f"constexpr std::uint8_t k{n.capitalize()} = {1 << b};" for b, n in enumerate(FLAGS))
    cells = [record for block in blocks for record in block]
    return f"""// Character properties as Hugging Face `tokenizers` sees them. Generated: do not edit.
// {source.replace(chr(10), chr(10) + "// ")}
// clang-format off
{flag_lines}

struct UnicodeRecord {{
  std::uint8_t flags;
  std::uint8_t combining_class;
  std::uint16_t nfd_start;    // into kMappingPool; Hangul syllables are decomposed by arithmetic instead
  std::uint8_t nfd_length;    // 0: decomposes to itself
  std::uint16_t lower_start;  // into kMappingPool
  std::uint8_t lower_length;  // 0: is its own lower-case form
}};

constexpr std::uint32_t kBlockBits = {BLOCK.bit_length() - 1};

constexpr std::uint16_t kBlockIndex[{len(index)}] = {{
{numbers(index)}
}};

constexpr std::uint16_t kBlocks[{len(cells)}] = {{
{numbers(cells)}
}};

constexpr UnicodeRecord kRecords[{len(records)}] = {{
{wrap(record_words, "    ", False)}
}};

constexpr char32_t kMappingPool[{len(pool)}] = {{
{numbers(pool)}
}};
// clang-format on
"""


def composition_table(pairs: dict[tuple[int, int], int], source: str) -> str:
    """The text of csrc/unigram/composition_tables.inc."""
    words = [f"{{0x{first:X},0x{second:X},0x{c:X}}}," for (first, second), c in sorted(pairs.items())]
    return f"""// Canonical compositions as Hugging Face `tokenizers` makes them. Generated: do not edit.
// {source.split(chr(10), maxsplit=1)[0]}
// clang-format off
struct Composition {{
  char32_t first;
  char32_t second;
  char32_t composed;
}};

constexpr Composition kCompositions[{len(words)}] = {{  // by first and second; Hangul is composed by arithmetic instead
{wrap(words, "    ", False)}
}};
// clang-format on
"""


def main() -> int:
    """Writes the files, or with --check compares them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    arguments = parser.parse_args()
    sets = probe_sets()
    lower = probe_map(normalizers.Lowercase())
    nfd = probe_map(normalizers.NFD())
    for c in HANGUL:
        assert nfd.pop(c) == unicodedata.normalize("NFD", chr(c)), hex(c)
    check_context_free(lower, nfd)
    classes = probe_combining_classes(nfd)
    source = (
        f"Probed from tokenizers {tokenizers.__version__} by tools/generate_unicode_tables.py\n"
        f"(combining classes are measured against unicodedata {unicodedata.unidata_version})."
    )
    outputs = {
        ROOT / "csrc/wordpiece/unicode_tables.inc": cpp_table(sets, lower, nfd, classes, source),
        ROOT / "csrc/unigram/composition_tables.inc": composition_table(probe_compositions(nfd), source),
        ROOT / "bert_fast/reference/_unicode_tables.py": python_module(sets, lower, nfd, classes, source),
    }
    stale = False
    for path, text in outputs.items():
        same = path.is_file() and path.read_text() == text
        stale |= not same
        if not arguments.check:
            path.write_text(text)
        state = "unchanged" if same else ("out of date" if arguments.check else "written")
        print(f"{path.relative_to(ROOT)}: {len(text)} bytes, {state}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
