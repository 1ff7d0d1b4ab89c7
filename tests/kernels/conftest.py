"""Fixtures of the kernel tests, which run in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m interpreter`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _programs_are_of_the_test() -> None:
    """A test may change what launchers choose, which programs of earlier tests would not know."""
    from bert_fast.triton import _programs

    _programs.forget()


@pytest.fixture(autouse=True)
def _libraries_are_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may err as much as a library's products do; the C++ routine's err less."""
    from bert_fast.torch import _gemm

    monkeypatch.setattr(_gemm, "_own_routine", lambda *_: None)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write must show: fresh memory holds NaN instead of, often, zeros."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            is_filled = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()  # none while a call is traced
            return tensor.fill_(float("nan")) if is_filled else tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
