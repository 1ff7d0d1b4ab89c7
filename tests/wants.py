"""Which gradients a backward is asked for: what the tests of all ops are parametrized with."""

from collections.abc import Iterable
from itertools import combinations

import pytest


def parametrize_wants(*names: str, sizes: Iterable[int] | None = None) -> pytest.MarkDecorator:
    """Runs a test with `wants` as every set of the names, the empty one among them, or as those of these sizes."""
    sizes = range(len(names) + 1) if sizes is None else sizes
    chosen = [one for size in sizes for one in combinations(names, size)]
    sets, ids = [frozenset(one) for one in chosen], ["+".join(one) or "none" for one in chosen]
    return pytest.mark.parametrize("wants", sets, ids=ids)
