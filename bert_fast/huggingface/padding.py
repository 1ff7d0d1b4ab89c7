"""Padding on transformers' own path: what a fused model makes of it on the packed one, with the same module calls.

transformers computes hidden states for padding, and pools column 0 also where that is padding. A fused model returns 0
there and pools the first kept token. So that a result does not depend on the path, calls that run transformers' code
run under a `Padding`, which fused containers look up, and their outputs are amended.
"""

from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class CallLocal(Generic[_T]):
    """A value for the calls in a block, in this thread; code that torch.compile traced sees it in any thread."""

    def __init__(self, name: str) -> None:
        self._value: ContextVar[_T | None] = ContextVar(name, default=None)
        self._traced: _T | None = None  # torch.compile cannot follow context variables

    def get(self) -> _T | None:
        """The value of the innermost block, or None."""
        return self._traced if torch.compiler.is_compiling() else self._value.get()

    def set(self, value: _T | None) -> "_Block[_T]":
        """The block, for `with`."""
        return _Block(self, value)


class _Block(Generic[_T]):
    """Entered at every call of a head: a generator takes twice as long."""

    __slots__ = ("local", "token", "value")

    def __init__(self, local: CallLocal[_T], value: _T | None) -> None:
        self.local, self.value = local, value
        self.token: Token[_T | None] | None = None

    def __enter__(self) -> None:
        local = self.local
        local._traced = self.value
        if not torch.compiler.is_compiling():
            self.token = local._value.set(self.value)

    def __exit__(self, *error: object) -> None:
        self.local._traced = None
        if self.token is not None:
            self.local._value.reset(self.token)


def first_kept(hidden: Tensor, kept: Tensor) -> Tensor:
    """Every sequence's first kept token, [B, H], exactly 0 where it has none.

    hidden (Tensor [B, S, H]); kept (Tensor [B or 1, S], bool).
    """
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return hidden[rows, kept.int().argmax(1)].masked_fill(~kept.any(1, keepdim=True), 0.0)


class Padding:
    """What is padding in a call, and what to make of it.

    kept (Tensor [B or 1, S], bool): the tokens. between: hidden states are made 0 between the layers, so that those
    that the caller asked for have their part in what follows, and get its gradient.
    """

    def __init__(self, kept: Tensor, between: bool) -> None:
        self.kept, self.between = kept, between
        self._zeroed: list[Tensor] = []

    def first(self, hidden: Tensor) -> Tensor:
        """[B, 1, H] of the tokens that are pooled, from [B, S, H]."""
        return first_kept(hidden, self.kept.to(hidden.device)).unsqueeze(1)

    def zeroed(self, value: Any) -> Any:
        """Hidden states [B, S, H], alone or in tuples, with 0 on padding; anything else as it is."""
        if type(value) is tuple:
            return tuple(map(self.zeroed, value))
        if not isinstance(value, Tensor) or value.dim() != 3 or any(value is each for each in self._zeroed):
            return value
        self._zeroed.append(value.masked_fill(~self.kept.to(value.device).unsqueeze(-1), 0.0))
        return self._zeroed[-1]

    def amended(self, output: Any) -> Any:
        """What a model without a head returns, with 0 on padding."""
        if isinstance(output, tuple):
            return self.zeroed(output)
        last = output.last_hidden_state
        output.last_hidden_state = zeroed = self.zeroed(last)
        states = output.get("hidden_states")
        if states is not None:
            output.hidden_states = tuple(zeroed if each is last else self.zeroed(each) for each in states)
        return output


padding_of_call: CallLocal[Padding] = CallLocal("padding_of_call")
