"""Writes character maps as SentencePiece compiles them into its models, for tests: a trie and the replacements.

The format: the size of the trie in bytes (uint32, little-endian); the trie, a double array of uint32 units as the
darts-clone library keeps it; the replacements as UTF-8, each ended by a zero byte. The child of a node by byte c stands
at base ^ c, and the value of a key at base ^ 0, with the highest bit set: where its replacement starts.
"""

import base64
import struct
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any


def charsmap(replacements: Mapping[bytes, str]) -> bytes:
    """The compiled map of these keys, not empty and without a zero byte, to what takes their place."""
    strings, places = bytearray(), dict[str, int]()
    for text in replacements.values():
        if text not in places:
            places[text] = len(strings)
            strings += text.encode() + b"\0"
    root: dict[int, Any] = {}
    for key, text in replacements.items():
        node = root
        for byte in key:
            node = node.setdefault(byte, {})
        node[0] = places[text]
    units = _double_array(root)
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + bytes(strings)


def _double_array(root: dict[int, Any]) -> list[int]:
    units: dict[int, int] = {0: 0}
    queue = [(0, root)]
    first_free = 1
    for place, node in queue:
        base = first_free
        while any(base ^ byte in units for byte in node):
            base += 1
        while first_free in units:
            first_free += 1
        units[place] |= (place ^ base) << 10 | (0x100 if 0 in node else 0)
        assert place ^ base < 1 << 21
        for byte, child in node.items():
            units[base ^ byte] = child | 1 << 31 if byte == 0 else byte
            if byte:
                queue.append((base ^ byte, child))
        while first_free in units:
            first_free += 1
    size = (max(units) // 256 + 2) * 256
    return [units.get(place, 0) for place in range(size)]


def encoded(replacements: Mapping[bytes, str]) -> str:
    """The compiled map as a tokenizer.json holds it."""
    return base64.b64encode(charsmap(replacements)).decode()


def nfkc_map() -> dict[bytes, str]:
    """NFKC with what SentencePiece's own rules (nmt_nfkc) add to it: controls vanish, whitespace becomes a space."""
    rules = {}
    for code in range(1, sys.maxunicode + 1):
        char = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        if unicodedata.normalize("NFKC", char) != char:
            rules[char.encode()] = unicodedata.normalize("NFKC", char)
    for code in [*range(1, 9), 0xB, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F, 0xAD, 0x200B, 0x200E, 0x200F, 0xFEFF]:
        rules[chr(code).encode()] = ""
    for char in "\t\n\r\f\x85\xa0\u1680\u2000\u2007\u2028\u2029\u202f\u205f\u3000":
        rules[char.encode()] = " "
    for base in "aeiouncAEIOUNC":  # of the compositions those that short texts have
        for mark in "\u0300\u0301\u0302\u0303\u0308\u0327":
            composed = unicodedata.normalize("NFKC", base + mark)
            if len(composed) == 1:
                rules[(base + mark).encode()] = composed
    return rules
