"""Triton's interpreter for tests: without work whose result it drops, and the last program of a large grid alone."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any
from unittest import mock


def spare_repetition() -> None:
    """From here on the interpreter leaves out what changes no result, half of its time. TRITON_INTERPRET must be 1.

    A launch replaces the functions of triton.language, and a call of a device function within it looks through them all
    once more; now only where one is left to replace. Sums of integers are made in 64 bits too, for an assertion that
    without `debug` nobody evaluates. The NumPy dtype of a Triton dtype is looked up in a table made for each question.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang

    @wraps(replace)
    def replace_once(function: Any) -> Any:
        within_a_launch = "__index__" in vars(tl.tensor)  # the interpreter's, taken away when the launch ends
        seen = seen_by(function)
        if within_a_launch and seen and not any(tl.core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()  # nothing to take back
        return replace(function)

    @cache
    def seen_by(function: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    look_up = interpreter._get_np_dtype
    of_numbers = cache(look_up)

    @wraps(look_up)
    def numpy_dtype(dtype: Any) -> Any:
        return look_up(dtype) if isinstance(dtype.scalar, tl.pointer_type) else of_numbers(dtype.scalar)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_dtype
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


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
