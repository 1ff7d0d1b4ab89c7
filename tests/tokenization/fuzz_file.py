r"""Texts with the results of Hugging Face `tokenizers`, in a file that tests of any language read.

    python -m tests.tokenization.fuzz_file write FILE [--texts N]    settings, texts, expected tokens
    python -m tests.tokenization.fuzz_file check FILE [--some]       our C++ core against it, in this process

The library takes most of the time of a comparison, so it is asked once, and the C++ tests under sanitizers and the
Python tests with every SIMD level read its answers. A file holds blocks, one for each setting: strings are a uint32
length and bytes, arrays a uint64 count, a uint8 width in bytes and little-endian unsigned integers.

    magic "wordpiece texts 2\n", a string that tells what made the file, then until the end blocks of:
    name, prefix (strings); clean_text, handle_chinese_chars, strip_accents, lowercase (uint8 each)
    max_word_chars, number of added tokens (arrays of one); each: content, array of id and four switches
    vocabulary: array of ends, then one string of all tokens; texts: the same, UTF-8 with or without broken bytes
    tokens: array of ends by text, ids, offsets (two a token, in code points), word ids

What is before the texts is WordPiece's own; unigram_fuzz_file.py has another `Format`.
"""

import argparse
import array
import concurrent.futures
import functools
import gc
import hashlib
import itertools
import os
import struct
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from . import fuzz_grammar, native_core
from .fuzz_grammar import Setting, make_settings, make_texts
from .native_core import tokenizers

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
MAGIC = b"wordpiece texts 2\n"
FULL_FILE = ROOT / "build" / "fuzz" / "wordpiece.bin"  # where the check runner puts the file with all texts
NUM_TEXTS = 500_000  # of the grammar; sweeps over code points and real texts come on top
SEED = 7
SWITCHES = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
Result = tuple[list[int], list[tuple[int, int]], list[int]]


class Block(NamedTuple):
    """One setting with texts and the tokens that the library makes of them."""

    setting: Setting
    texts: list[bytes]
    ends: np.ndarray  # [n]: where each text's tokens end
    ids: np.ndarray  # [N]
    offsets: np.ndarray  # [N, 2]
    word_ids: np.ndarray  # [N]

    def result(self, index: int) -> Result:
        part = slice(self.ends[index - 1] if index else 0, self.ends[index])
        pairs = [(int(start), int(stop)) for start, stop in self.offsets[part]]
        return self.ids[part].tolist(), pairs, self.word_ids[part].tolist()


class Format(NamedTuple):
    """A kind of tokenizer: its settings, and how a file holds them."""

    magic: bytes
    num_texts: int  # of the grammar, in a whole file
    sources: tuple[str, ...]  # files that decide what is in one, besides this module
    plan_blocks: Callable[[int, int], list[tuple[Setting, list[bytes] | int]]]
    write_setting: Callable[[Setting], bytes]
    read_setting: Callable[[BinaryIO], Setting]


def file_key(num_texts: int, form: Format) -> bytes:
    """Changes with whatever decides what a file holds."""
    sources = [Path(source).read_bytes() for source in form.sources]
    sources += [Path(__file__).read_bytes(), str(num_texts).encode(), str(DATA.is_dir()).encode()]
    return hashlib.sha256(b"".join(sources) + tokenizers.__version__.encode()).hexdigest().encode()


def is_current(path: Path, num_texts: int | None = None, form: Format | None = None) -> bool:
    """Whether the file is there and what `write_file` would write."""
    form = form or WORDPIECE
    num_texts = num_texts or form.num_texts
    if not path.is_file():
        return False
    start = form.magic + write_string(file_key(num_texts, form))
    with open(path, "rb") as file:
        return file.read(len(start)) == start


# --- what is in it ----------------------------------------------------------------------------------------------------


EVERY_CODE_POINT = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def special_code_points() -> list[int]:
    """All but planes without characters, ideographs, syllables and private use.

    These are alike within themselves, and their ends are here.
    """
    alike = ((0x3480, 0x4D80), (0x4E80, 0x9F00), (0xAD00, 0xD700), (0xE100, 0xF800), (0x12400, 0x16800))
    alike += ((0x17080, 0x1AF00), (0x20100, 0x2A600), (0x2A780, 0x2B700), (0x2B980, 0x2F780), (0x2FA80, 0xE0000))
    return [c for c in EVERY_CODE_POINT if c < 0xE0200 and not any(first <= c < last for first, last in alike)]


def code_point_settings() -> list[tuple[Setting, list[bytes]]]:
    """Every code point alone, in a word, beside punctuation, an ideograph and combining marks; one list per setting."""
    special = special_code_points()
    # Options change nothing about most letters without case: of these every fourth is taken.
    changed = [c for c in special if c % 4 == 0 or chr(c) != unicodedata.normalize("NFD", chr(c)).lower()]
    changed += [c for c in special if unicodedata.category(chr(c))[0] in "CMPZ" and c % 4]
    vocab = ["[UNK]", *map(chr, special), *("##" + chr(c) for c in special)]
    short, full = "a{0}b ", "{0} a{0}b {0}b! {0},a{0} 中{0}中 e\u0301{0}\u0323a \u200b{0}\u0301 "

    def texts(shape: str, code_points: Sequence[int], per_text: int) -> list[bytes]:
        pieces = [shape.format(chr(c)) for c in code_points]
        return ["".join(pieces[i : i + per_text]).encode() for i in range(0, len(pieces), per_text)]

    plans: list[tuple[str, dict[str, Any], str, list[int], int]] = []
    for options in ({}, {"lowercase": False}):
        plans.append(("inside a word", options, short, EVERY_CODE_POINT, 256))
        plans.append(("in all places", options, full, special, 32))
        plans.append(("alone", options, "{0}", special, 1))
    for values in itertools.product((True, False), repeat=4):
        plans.append(
            ("with all options", dict(zip(SWITCHES, values, strict=True)), "a{0}b {0} e{0}\u0301 ", changed, 64)
        )
    return [(Setting(f"every code point {name}", vocab, options), texts(*plan)) for name, options, *plan in plans]


def real_settings(data: Path) -> list[tuple[Setting, list[bytes]]]:
    """Every line of every text file with each vocabulary, some of them also with the other case."""
    if not data.is_dir():
        return []
    other = [line.encode() for line in dict.fromkeys(native_core.read_corpus(data))]
    english = [*native_core.read_books(data), *native_core.read_labelled_texts(data)]
    english_texts = [line.encode() for line in dict.fromkeys(english)]
    real = []
    for name in fuzz_grammar.VOCABULARIES:
        vocab = native_core.read_vocab(data, name)
        lowercase = name.endswith(("uncased", "chinese"))
        texts = other + english_texts[:: 1 if name in ("bert-base-uncased", "bert-base-cased") else 4]
        real.append((Setting(f"real texts, {name}", vocab, {"lowercase": lowercase}), texts))
        real.append((Setting(f"real texts, {name}, other case", vocab, {"lowercase": not lowercase}), texts[::8]))
    return real


def plan_blocks(num_texts: int, seed: int) -> list[tuple[Setting, list[bytes] | int]]:
    """Settings with their texts, or with the number of texts to make."""
    settings = make_settings(DATA, seed)
    plans: list[tuple[Setting, list[bytes] | int]] = []
    num_seams = sum(setting.seams for setting in settings)
    seam_count = min(num_texts // 1000, 1000)  # these are fifty times as long
    count = -(-(num_texts - num_seams * seam_count) // (len(settings) - num_seams))
    plans += [(setting, seam_count if setting.seams else count) for setting in settings]
    if num_texts >= NUM_TEXTS:
        plans += [*code_point_settings(), *real_settings(DATA)]
    return plans


# --- writing ----------------------------------------------------------------------------------------------------------


def library_results(setting: Setting, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ends, ids, offsets [2N] and word ids of the library; broken bytes count as U+FFFD, one for each invalid part."""
    library = setting.make_library()
    ids, offsets, word_ids = array.array("I"), array.array("I"), array.array("I")
    ends = []
    gc.disable()  # millions of small objects, none of them in a cycle
    for start in range(0, len(texts), 1000):
        batch = [text.decode(errors="replace") for text in texts[start : start + 1000]]
        for encoding in library.encode_batch(batch, add_special_tokens=False):
            ids.extend(encoding.ids)
            offsets.extend(itertools.chain.from_iterable(encoding.offsets))
            word_ids.extend(encoding.word_ids)
            ends.append(len(ids))
    gc.enable()
    return np.array(ends), *(np.frombuffer(values, np.uint32) for values in (ids, offsets, word_ids))


def write_setting(setting: Setting) -> bytes:
    options = dict.fromkeys(SWITCHES, True) | setting.options
    if options["strip_accents"] is None or "strip_accents" not in setting.options:
        options["strip_accents"] = options["lowercase"]
    parts = [write_string(setting.name.encode()), write_string(setting.prefix.encode())]
    parts.append(bytes(bool(options[name]) for name in SWITCHES))
    parts += [write_array([setting.options.get("max_word_chars", 100)])]
    return b"".join([*parts, *write_added(setting), *write_strings([token.encode() for token in setting.vocab])])


def write_added(setting: Setting) -> list[bytes]:
    """The number of added tokens, and each of them."""
    added = setting.options.get("added_tokens", ())
    parts = [write_array([len(added)])]
    for content, *numbers in added:
        parts += [write_string(content.encode()), write_array([int(number) for number in numbers])]
    return parts


def make_block(plan: tuple[Setting, list[bytes] | int], form: Format | None = None) -> bytes:
    """The bytes of a block with these texts, or with that many of the grammar."""
    setting, texts = plan
    if isinstance(texts, int):
        texts = list(make_texts(setting, texts, SEED))
    parts = [(form or WORDPIECE).write_setting(setting), *write_strings(texts)]
    return b"".join([*parts, *(write_array(values) for values in library_results(setting, texts))])


def write_strings(strings: Sequence[bytes]) -> list[bytes]:
    return [write_array(np.cumsum([len(string) for string in strings])), write_string(b"".join(strings))]


def write_string(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def write_array(values: Any) -> bytes:
    numbers = np.asarray(values, np.uint64)
    width = 2 if numbers.size == 0 or numbers.max() < 1 << 16 else 4
    return struct.pack("<QB", len(numbers), width) + numbers.astype(f"<u{width}").tobytes()


def write_file(path: Path, num_texts: int, processes: int = 1, form: Format | None = None) -> None:
    """Writes the file, atomically."""
    form = form or WORDPIECE
    plans = form.plan_blocks(num_texts, SEED)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with open(unfinished, "wb") as file, concurrent.futures.ProcessPoolExecutor(processes) as pool:
        file.write(form.magic + write_string(file_key(num_texts, form)))
        make: Callable[..., Any] = pool.map if processes > 1 else map
        for block in make(functools.partial(make_block, form=form), plans):
            file.write(block)
    os.replace(unfinished, path)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_blocks(path: Path, form: Format | None = None) -> Iterator[Block]:
    form = form or WORDPIECE
    with open(path, "rb") as file:
        if file.read(len(form.magic)) != form.magic:
            raise ValueError(f"{path}: expected a file that starts with {form.magic!r}")
        read_string(file)
        while file.peek(1):
            setting, texts = form.read_setting(file), read_strings(file)
            ends, ids, offsets, word_ids = (read_array(file) for _ in range(4))
            yield Block(setting, texts, ends, ids, offsets.reshape(-1, 2), word_ids)


def read_setting(file: BinaryIO) -> Setting:
    name, prefix = read_string(file).decode(), read_string(file).decode()
    options: dict[str, Any] = {"continuing_prefix": prefix}
    options |= {switch: bool(value) for switch, value in zip(SWITCHES, file.read(4), strict=True)}
    options["max_word_chars"] = int(read_array(file)[0])
    added = read_added(file)
    return Setting(name, [token.decode() for token in read_strings(file)], options | {"added_tokens": added})


def read_added(file: BinaryIO) -> list[tuple[Any, ...]]:
    added = []
    for _ in range(int(read_array(file)[0])):
        content, numbers = read_string(file).decode(), read_array(file).tolist()
        added.append((content, numbers[0], *map(bool, numbers[1:])))
    return added


WORDPIECE = Format(
    MAGIC, NUM_TEXTS, (fuzz_grammar.__file__, native_core.__file__), plan_blocks, write_setting, read_setting
)


def read_string(file: BinaryIO) -> bytes:
    (size,) = struct.unpack("<I", file.read(4))
    return file.read(size)


def read_strings(file: BinaryIO) -> list[bytes]:
    ends = read_array(file).tolist()
    blob = read_string(file)
    return [blob[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def read_array(file: BinaryIO) -> np.ndarray:
    count, width = struct.unpack("<QB", file.read(9))
    return np.frombuffer(file.read(count * width), f"<u{width}").astype(np.int64)


# --- checking ---------------------------------------------------------------------------------------------------------


def our_result(ours: Any, text: str | bytes) -> Result:
    ids, _, offsets, word_ids = ours.encode([text], offsets=True, word_ids=True)
    return ids.tolist(), [tuple(pair) for pair in offsets.tolist()], word_ids.tolist()


def library_result(library: Any, text: str | bytes) -> Result:
    encoding = library.encode(
        text if isinstance(text, str) else text.decode(errors="replace"), add_special_tokens=False
    )
    return encoding.ids, encoding.offsets, encoding.word_ids


def shrink(text: Any, fails: Callable[[Any], bool]) -> Any:
    """A part of the text (str or bytes) that still fails and of which nothing can be left out."""
    size = len(text)
    while size > 0:
        start = 0
        while start < len(text):
            shorter = text[:start] + text[start + size :]
            if fails(shorter):
                text = shorter
            else:
                start += size
        size //= 2
    return text


def explain(setting: Setting, text: str | bytes) -> str:
    """The smallest text on which our tokenizer and the library differ, with what both say."""
    ours, library = setting.make_ours(), setting.make_library()

    def differs(part: Any) -> bool:
        want = library_result(library, part)
        return our_result(ours, part) != want or ours.encode([part])[0].tolist() != want[0]

    smallest = shrink(text, differs)
    shown = f"{setting.name}: {setting.options!r:.2000}, {len(setting.vocab)} tokens\ntext     {smallest!a}"
    if not differs(smallest):
        shown += "\nalone it gives what the library does; it differed beside others"
    return f"{shown}\nours     {our_result(ours, smallest)}\nexpected {library_result(library, smallest)}"


def find_difference(block: Block, num_threads: int = 1) -> str | None:
    """What is wrong with the block's first text that our core splits in another way; None if there is none.

    The texts are encoded as str, in whichever form Python keeps them, with offsets and word ids, and once more as UTF-8
    bytes for the ids alone.
    """
    ours = block.setting.make_ours()
    texts = [text.decode(errors="replace") for text in block.texts]
    ids, cu_seqlens, offsets, word_ids = ours.encode(texts, offsets=True, word_ids=True, num_threads=num_threads)
    plain_ids, plain_ends, no_offsets, no_word_ids = ours.encode(block.texts, num_threads=num_threads)
    assert no_offsets is None and no_word_ids is None
    expected = (block.ends, block.ids, block.offsets, block.word_ids, block.ids, block.ends)
    actual = (cu_seqlens[1:], ids, offsets, word_ids, plain_ids, plain_ends[1:])
    if all(map(np.array_equal, actual, expected)):
        return None
    for k, raw in enumerate(block.texts):
        want = block.result(k)
        part = slice(cu_seqlens[k], cu_seqlens[k + 1])
        pairs = [tuple(pair) for pair in offsets[part].tolist()]
        if (ids[part].tolist(), pairs, word_ids[part].tolist()) != want:
            return explain(block.setting, texts[k])
        if plain_ids[plain_ends[k] : plain_ends[k + 1]].tolist() != want[0]:
            return explain(block.setting, raw)
    raise AssertionError("arrays differ and no text does")


def check_file(path: Path, some: bool = False, form: Format | None = None) -> tuple[int, list[str]]:
    """The number of texts compared and up to five differences. some: every sixth block, and all with seams."""
    count, found = 0, []
    for k, block in enumerate(read_blocks(path, form)):
        if some and k % 6 and "seams" not in block.setting.name:
            continue
        count += len(block.texts)
        difference = find_difference(block)
        found += [difference] if difference else []
        if len(found) >= 5:
            break
    return count, found


def main(form: Format | None = None) -> int:
    form = form or WORDPIECE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--texts", type=int, default=form.num_texts, help="write: how many texts of the grammar")
    parser.add_argument("--some", action="store_true", help="check: a part of the blocks")
    arguments = parser.parse_args()
    if arguments.command == "check":
        count, found = check_file(arguments.file, arguments.some, form)
        print("\n".join([*found, f"{count} texts, {'DIFFERENCES' if found else 'no difference'}"]))
        return 1 if found else 0
    if is_current(arguments.file, arguments.texts, form):
        print("the file is there")
        return 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core instead
    write_file(arguments.file, arguments.texts, os.cpu_count() or 1, form)
    print(f"{arguments.file.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
