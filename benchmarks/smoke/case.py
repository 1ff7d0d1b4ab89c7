"""What a smoke case is.

Importing this module imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WHOLE = "whole"  # the family of what is no op: a model, a graph, a product of the library


class Skipped(Exception):
    """What a case needs is not there."""


@dataclass(frozen=True)
class SmokeCase:
    """A case by name.

    check: given the device, compares (see `bert_fast.testing.compare`) or raises what is wrong; returns fields of the
    case's line.
    """

    name: str
    check: Callable[[Any], dict[str, Any]]
