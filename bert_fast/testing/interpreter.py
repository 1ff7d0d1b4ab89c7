"""Runs the last program of a Triton grid alone, in Triton's interpreter: launches too large to run as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

__all__ = ["last_programs"]


@contextmanager
def last_programs() -> Iterator[None]:
    """Within the context every launch runs only the last program of its grid, under its real number and grid size.

    So a test can reach rows beyond 2^31 elements in a moment. TRITON_INTERPRET must be 1.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import interpreter_builder as builder

    run = GridExecutor.__call__

    def run_last(executor: Any, *arguments: Any, **keywords: Any) -> Any:
        size = (*executor.grid, 1, 1)[:3]
        last = tuple(n - 1 for n in size)
        executor.grid = (1, 1, 1)
        with mock.patch.multiple(
            builder,
            set_grid_dim=lambda *_: setattr(builder, "grid_dim", size),
            set_grid_idx=lambda *_: setattr(builder, "grid_idx", last),
        ):
            return run(executor, *arguments, **keywords)

    with mock.patch.object(GridExecutor, "__call__", run_last):
        yield
