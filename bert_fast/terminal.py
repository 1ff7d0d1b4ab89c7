"""What data may not do to a terminal: names of labels and files, and texts, reach it with nothing that it obeys."""

import re

__all__ = ["printable"]

# Control characters but for tabs and line ends; marks that turn the direction of a line; line ends that are none to
# whoever reads on; halves of characters, which cannot be encoded, such as bytes of file names that are not UTF-8.
_ACTIVE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with what a terminal would act on as \u001b and the like: as JSON has it, too."""
    return _ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
