"""The interpreter that the tests of kernels run in leaves out work whose result it drops, and nothing else."""

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.interpreter
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _row_sum(x):
    return tl.sum(_doubled(x), axis=1)


@triton.jit
def _sums_kernel(x_ptr, y_ptr, n_rows, N: tl.constexpr, REPEATS: tl.constexpr):
    rows = tl.program_id(0) * 2 + tl.arange(0, 2)
    x = tl.load(x_ptr + rows[:, None] * N + tl.arange(0, N)[None, :], mask=rows[:, None] < n_rows, other=0)
    total = tl.zeros([2], x_ptr.dtype.element_ty)
    for _ in range(REPEATS):
        total += _row_sum(x)
    tl.store(y_ptr + rows, total, mask=rows < n_rows)


def sums(x: torch.Tensor, repeats: int) -> torch.Tensor:
    y = torch.zeros(len(x), dtype=x.dtype)
    _sums_kernel[(triton.cdiv(len(x), 2),)](x, y, len(x), x.shape[1], repeats)
    return y


@pytest.fixture
def replacements(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was looked through for functions to replace, one entry a module or class."""
    from triton.runtime import interpreter

    seen: list[object] = []
    look_through = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *a: (seen.append(a[0]), look_through(*a)))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_results_are_those_of_the_interpreter_as_it_comes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x = (torch.randn(5, 16) * 100).to(dtype)
    y = sums(x, 3)
    for name in ("_patch_lang", "_get_np_dtype"):
        monkeypatch.setattr(interpreter, name, getattr(interpreter, name).__wrapped__)
    as_it_comes = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", as_it_comes)
    assert y.any()
    assert torch.equal(y, sums(x, 3))


def test_calls_within_a_launch_replace_nothing_anew(replacements: list[object]) -> None:
    x = torch.randn(4, 16)
    sums(x, 1)  # the first call of tl.sum finds functions of tl.core
    numbers = []
    for repeats in (1, 9):
        replacements.clear()
        sums(x, repeats)
        numbers.append(len(replacements))
    assert 0 < numbers[0] == numbers[1] <= 4


def test_the_language_is_itself_again_after_a_launch() -> None:
    for _ in range(2):
        sums(torch.randn(3, 16), 2)
        assert tl.core.is_builtin(tl.load)
        assert "__index__" not in vars(tl.tensor)


def test_integers_wrap_around_as_on_a_gpu() -> None:
    x = torch.full((2, 2), 2**30, dtype=torch.int32)
    x[1] = 2**29
    assert sums(x, 1).tolist() == [0, -(2**31)]
