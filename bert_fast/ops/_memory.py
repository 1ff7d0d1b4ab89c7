"""Where a device has too little memory: the error says in which op, and on which device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_fast.devices import name_of


def name_call(error: torch.OutOfMemoryError, op: str, arguments: Iterable[Any]) -> None:
    """Puts op and device before the error's message, once, however many callers pass it on.

    It stays the error that it was, with one argument: who retries with a smaller batch knows it by that.
    arguments: of the call; the first tensor among them, or in a list of them, is where it ran.
    """
    device = next((where for where in map(_device_of, arguments) if where is not None), None)
    start = f"{op} on {'an unknown device' if device is None else name_of(device)}: "
    if not str(error).startswith(start):
        error.args = (f"{start}{error}",)


def _device_of(argument: Any) -> torch.device | None:
    if isinstance(argument, Tensor):
        return argument.device
    if isinstance(argument, list | tuple):
        return next((where for where in map(_device_of, argument) if where is not None), None)
    return None
