"""What a model says about batches, put together over all batches and processes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["alone", "joined", "means", "on_host"]


def on_host(value: Tensor) -> np.ndarray:
    """The numbers of a tensor; half precision becomes fp32."""
    value = value.detach()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()


def joined(found: list[tuple[int, list[np.ndarray], list[np.ndarray]]], which: int) -> Any:
    """Arrays over all batches in their order: one, a tuple of several, or None."""
    ordered: list[Any] = [one[which] for one in sorted(found, key=lambda one: one[0])]
    if not ordered or not ordered[0]:
        return None
    try:
        return alone([np.concatenate(arrays) for arrays in zip(*ordered, strict=True)])
    except ValueError as error:
        raise ValueError(
            f"data_collator: expected batches whose outputs can be joined, as those of PackedCollator: {error}"
        ) from None


def alone(values: list[Any]) -> Any:
    """A single value by itself, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def means(everyone: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """The parts of the loss over all labels of all processes, and their sum, "loss"."""
    names = sorted({name for one in everyone for name in one})
    sums = [[one[name] for one in everyone if name in one] for name in names]
    parts = {
        name: sum(total for total, _ in several) / max(sum(count for _, count in several), 1)
        for name, several in zip(names, sums, strict=True)
    }
    return parts and {"loss": sum(parts.values())} | parts
