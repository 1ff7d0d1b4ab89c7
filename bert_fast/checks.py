"""Checks of arguments at the public boundary: the message names the argument, the expected and the actual."""

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bert_fast.env import SETTINGS

_STRIDED = torch.strided


def check_tensor(name: str, tensor: Any) -> None:
    """Raises TypeError unless `tensor` is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.layout is not _STRIDED:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name}: expected a dense Tensor, got layout {layout}")
    if tensor.is_nested:
        raise TypeError(f"{name}: expected a dense Tensor, got a nested one")


def check_shape(name: str, tensor: Any, expected: Sequence[int | str]) -> None:
    """Raises unless `tensor` has the expected shape; a string stands for any size and documents its meaning.

    Raises:
        TypeError: `tensor` is not a dense tensor.
        ValueError: wrong rank or size.
    """
    # Here, since a call costs more than this.
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not _STRIDED or tensor.is_nested:
        check_tensor(name, tensor)
    shape = tensor.shape
    if len(shape) == len(expected):
        for size, want in zip(shape, expected):  # noqa: B905 (checked; a generator would take twice as long)
            if size != want and not isinstance(want, str):
                break
        else:
            return
    wanted = "[" + ", ".join(str(size) for size in expected) + "]"
    raise ValueError(f"{name}: expected shape {wanted}, got {list(shape)}")


def check_dtype(name: str, tensor: Any, allowed: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless `tensor` is a tensor whose dtype is one of `allowed`."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype in allowed:
        return
    check_tensor(name, tensor)
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    raise TypeError(f"{name}: expected dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_floating(name: str, tensor: Any) -> None:
    """Raises TypeError unless `tensor` is a tensor of floating-point numbers."""
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, got {str(tensor.dtype).removeprefix('torch.')}")


def check_like(name: str, tensor: Any, expected: Sequence[int | str], other_name: str, other: torch.Tensor) -> None:
    """Raises unless `tensor` has the expected shape and the dtype and device of `other`."""
    check_shape(name, tensor, expected)
    if tensor.dtype != other.dtype:
        want, got = (str(dtype).removeprefix("torch.") for dtype in (other.dtype, tensor.dtype))
        raise TypeError(f"{name}: expected dtype {want} (that of {other_name}), got {got}")
    check_same_device(name, tensor, other_name, other)


def check_same_device(name: str, tensor: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both tensors live on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} (that of {other_name}), got {tensor.device}")


def check_host_or_same(name: str, tensor: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both tensors live on one device, or the first on the CPU."""
    if tensor.device != other.device and not is_host_beside(tensor, other.device):
        check_same_device(name, tensor, other_name, other)


def is_host_beside(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on the CPU, and what goes with it on a device whose memory holds values."""
    return tensor.device.type == "cpu" and device.type != "meta"


def is_alike(tensor: Any, checked: torch.Tensor | None) -> bool:
    """Whether what was checked of one tensor (shape, dtype, device) holds of the other; None is alike None alone.

    Much cheaper than to check both, which need only be done for the message.
    """
    if checked is None or not isinstance(tensor, torch.Tensor):
        return tensor is checked
    return (
        tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.shape == checked.shape
        and tensor.dtype is checked.dtype
        and tensor.device == checked.device
    )


def check_dropout_p(name: str, p: float) -> None:
    """Raises TypeError unless p is a number, ValueError unless 0 <= p <= 1."""
    if not isinstance(p, (int, float)):  # a union would be made anew in every call
        raise TypeError(f"{name}: expected a number, got {type(p).__name__}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: expected a probability in [0, 1], got {p}")


def check_number(name: str, value: Any) -> float:
    """`value` as a float; any real number will do that is finite as one.

    Raises:
        TypeError: not a real number; a bool is none.
        ValueError: infinite or NaN.
    """
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def check_flag(name: str, flag: Any) -> None:
    """Raises TypeError unless flag is a bool."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")


def check_size(name: str, size: Any) -> None:
    """Raises TypeError unless size is an int, ValueError unless it is at least 1."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")


def check_integer(name: str, value: Any) -> int:
    """`value` as an int; NumPy's integers and tensors that hold one (which sync) will do, a graph's symbolic one too.

    Raises:
        TypeError: not an integer; a bool is none.
        ValueError: of more than 64 bits.
    """
    if type(value) is not int:
        if isinstance(value, torch.SymInt):
            return value  # type: ignore[return-value]  # its value is the graph's business
        try:
            if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.is_meta):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an int of at most 64 bits, got {value}")
    return value


def check_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as an int from `least` to `most` (None: as many as 64 bits hold); takes what `check_integer` takes.

    Raises:
        TypeError: not an integer. ValueError: out of the range.
    """
    value = check_integer(name, value)
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ValueError unless value is one of these strings."""
    if not isinstance(value, str) or value not in choices:
        got = repr(value) if isinstance(value, str) else reprlib.repr(value)
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {got}")


def check_site(site: Any) -> None:
    """Raises TypeError unless site, which names a call of dropout, is an int, ValueError unless it is in [0, 2**31)."""
    if not 0 <= check_integer("site", site) < 2**31:
        raise ValueError(f"site: expected a number in [0, 2**31), got {site}")


def check_ids(name: str, ids: torch.Tensor, count: int) -> tuple[int, int] | None:
    """The least and the greatest, None where they are not looked at; raises ValueError unless all are in [0, count).

    Only where that costs no device sync: on the CPU, elsewhere with BERT_FAST_DEBUG=1; never in a compiled graph.
    """
    if torch.compiler.is_compiling() or (ids.device.type != "cpu" and not SETTINGS.debug) or not ids.numel():
        return None
    least, greatest = ids.aminmax()
    low, high = int(least), int(greatest)
    if low < 0 or high >= count:
        raise ValueError(f"{name}: expected ids in [0, {count}), got {low if low < 0 else high}")
    return low, high
