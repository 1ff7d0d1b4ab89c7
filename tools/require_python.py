"""Ends with a message where this interpreter is older than pyproject.toml allows; says nothing else.

The Makefile runs this before anything else, by whatever `python3` is on PATH: so it keeps to what any Python can read.
"""

import os
import re
import sys

PYPROJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pyproject.toml")
MESSAGE = (
    "bert_fast needs Python {0}.{1} or newer, and {2} is Python {3}.{4}. Name another: make ... PYTHON=python{0}.{1}"
)


def oldest():
    """The oldest minor version that is supported: (3, 10)."""
    with open(PYPROJECT) as file:
        found = re.search(r'^requires-python = ">=(\d+)\.(\d+)"', file.read(), re.MULTILINE)
    return int(found.group(1)), int(found.group(2))


def problem(version, path):
    """What to do about an interpreter of this version; None where it is new enough."""
    wanted = oldest()
    if tuple(version[:2]) >= wanted:
        return None
    return MESSAGE.format(wanted[0], wanted[1], path, version[0], version[1])


if __name__ == "__main__":
    sys.exit(problem(sys.version_info, sys.executable))
