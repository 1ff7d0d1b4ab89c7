"""One case: a number, from which all else follows, and what is done with the library."""

import random
import reprlib
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .rules import argument_names, objection


class Refused(Exception):
    """The library refused a call as it should; the case ends well."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__


class Finding(Exception):
    """Something that the library must not do: the reason why the case failed."""


class PoorRefusal(Finding):
    """The library refused, and not as it should: with another exception, or without saying what was wrong."""


class Case:
    """What a surface draws its arguments from, and makes its calls through.

    Attributes:
        number: names the case; everything random follows from it.
        rng: draws.
        talks: whether each call is printed before it is made, as a line of a script.
    """

    def __init__(self, number: int, talks: bool = False) -> None:
        self.number = number
        self.talks = talks
        self.rng = random.Random(number)
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """An empty folder of this case alone."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="case-"))
        return self._folder

    def close(self) -> None:
        """Removes what the case left in the file system."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def seed_generators(self) -> None:
        """The generators of PyTorch and NumPy start where the case's number says."""
        torch.default_generator.manual_seed(self.number)  # of the CPU alone: all others together take a millisecond
        np.random.seed(self.number % 2**32)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def say(self, line: str) -> None:
        """A line of the script that the case is."""
        if self.talks:
            print(line, flush=True)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        names: Iterable[str] = (),
        any_error: bool = False,
        **options: Any,
    ) -> Any:
        """The result of the call.

        names: what a refusal may name beside the function's arguments and the folder of the case.
        any_error: whether every Exception is a refusal; for calls that go past the library's own functions.

        Raises:
            Refused: the library refused, and said why.
            Finding: it raised something else.
        """
        if self.talks:
            shown = [*map(describe, arguments), *(f"{name}={describe(value)}" for name, value in options.items())]
            self.say(f"{_name_of(function)}({', '.join(shown)})")
        try:
            return function(*arguments, **options)
        except (Finding, Refused):
            raise
        except BaseException as error:
            known = [*argument_names(function), *names]
            if self._folder is not None:
                known.append(str(self._folder))
            is_accepted = any_error and isinstance(error, Exception)
            problem = None if is_accepted else objection(error, known)
            self.say(f"# {type(error).__name__}: {str(error)[:500]}")
            if problem is None:
                raise Refused(error) from None
            is_out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            kind = PoorRefusal if isinstance(error, Exception) and not is_out_of_memory else Finding
            raise kind(f"{problem} (at {place_of(error)})") from error

    def expect(self, condition: Any, what: str) -> None:
        """A finding unless the condition holds."""
        if not condition:
            raise Finding(what)


def place_of(error: BaseException) -> str:
    """The innermost line of the library that the error went through."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if "/bert_fast/" in frame.filename]
    return f"{lines[-1].filename.rpartition('/bert_fast/')[2]}:{lines[-1].lineno}" if lines else "the call"


def _name_of(function: Callable[..., Any]) -> str:
    bound = getattr(function, "__self__", None)
    name = getattr(function, "__qualname__", None) or f"<{type(function).__name__}>"
    return name if bound is None or isinstance(bound, type) else f"<{type(bound).__name__}>.{name.split('.')[-1]}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def describe(value: Any) -> str:
    """A value as a script would write it, shortened."""
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{', '.join(map(describe, value))}]"
    try:
        return _short.repr(value)
    except Exception as error:  # a hostile argument: what fails is its own __repr__
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def _describe_tensor(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout != torch.strided:
        return f"{text} {tensor.layout}"
    if not tensor.is_contiguous():
        text += f" strides {list(tensor.stride())}"
    if tensor.is_neg() or tensor._is_zerotensor():
        text += " lazily negated" if tensor.is_neg() else " without memory (_efficientzerotensor)"
    if tensor.device.type != "cpu":
        return f"{text} on {tensor.device}"
    if tensor.requires_grad:
        text += " wants gradient"
    if 0 < tensor.numel() <= 12 and not tensor.is_floating_point() and not tensor._is_zerotensor():
        text += f" {tensor.tolist()}"
    return text
