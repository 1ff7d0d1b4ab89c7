"""What the package cannot do without, checked before anything else is imported: a sentence, not a traceback."""

import re

import torch

_OLDEST = (2, 10)


def check_torch(version: str = torch.__version__) -> None:
    """Raises ImportError where this torch is older than the operators of the package need; it says what to install."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ImportError(f"bert_fast needs torch >= {oldest}, this is {version}: pip install 'torch>={oldest}'")


check_torch()
