"""What follows from the form of tensors alone, worked out once for tensors that come again, as parameters do.

Whether tensors are as they were is asked in one call, a microsecond for sixteen: the one with which `torch.compile`
finds out whether what it compiled still fits. Dynamo itself is not imported.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Remembered", "guard_of"]

_MAX_KNOWN = 4096  # groups of tensors; the first ones go first
_ID_OF_NONE = id(None)
_Group = tuple[Tensor | None, ...]
_Guard = Callable[..., bool]


class Remembered:
    """A function of groups of tensors and None that looks at their form: what makes two calls of a kernel alike.

    That is class, dtype, device, layout, sizes, strides and `requires_grad` of each tensor, what PyTorch's dispatcher
    would do with it, and where `by_address` is given its address; never its values. function: its result may hold no
    tensor. It is called again where a group's form has changed, and tensors are not kept.
    """

    def __init__(self, function: Callable[[_Group], Any], *, by_address: bool = False) -> None:
        self._function, self._by_address = function, by_address
        # By the identities of tensors: whether all have their form, where they were, and what followed.
        self._known: dict[tuple[int, ...], tuple[_Guard, list[int] | None, Any]] = {}

    def __call__(self, group: _Group) -> Any:
        """What the function returns for the group."""
        key = tuple(map(id, group))
        tensors: Sequence[Any] = [one for one in group if one is not None] if _ID_OF_NONE in key else group
        known = self._known.get(key)
        if known is not None:
            guard, addresses, result = known
            if guard(*tensors) and (addresses is None or addresses == list(map(Tensor.data_ptr, tensors))):
                return result
        result = self._function(group)
        addresses = list(map(Tensor.data_ptr, tensors)) if self._by_address else None
        if len(self._known) >= _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = guard_of(tensors), addresses, result
        return result


def guard_of(tensors: Sequence[Tensor], num_of_any_size: int = 0) -> _Guard:
    """Whether as many tensors have the form of these; of the first ones any sizes and strides will do."""
    if _has_guards() and tensors and len({*map(id, tensors)}) == len(tensors):  # the same one twice is never as it was
        sizes = strides = None
        if num_of_any_size:
            any_size = [[None] * one.dim() for one in tensors[:num_of_any_size]]
            others = tensors[num_of_any_size:]
            sizes = [*any_size, *[list(one.shape) for one in others]]
            strides = [*any_size, *[list(one.stride()) for one in others]]
        guard: _Guard = _guards()(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return guard
    forms = _forms_of(tensors, num_of_any_size)
    return lambda *others: forms == _forms_of(others, num_of_any_size)


def _guards() -> Any:
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards


@functools.cache
def _has_guards() -> bool:
    """Whether PyTorch has what is not part of its public interface, and it does what it does in those that we know."""
    one, other = torch.empty(2, 3), torch.empty(3, 2)
    try:
        check = _guards()(one, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not (check(one) is True and check(other) is False and check(other.t()) is False):
            return False
        check = _guards()(one, other, dynamic_dims_sizes=[[None] * 2, [3, 2]], dynamic_dims_strides=[[None] * 2, [2, 1]]).check
        return check(other.t(), other) is True and check(one, one) is False and check(one[0], other) is False
    except (ImportError, TypeError, AttributeError):
        return False


def _forms_of(tensors: Sequence[Tensor], num_of_any_size: int) -> list[tuple[Any, ...]]:
    return [_form_of(one, place < num_of_any_size) for place, one in enumerate(tensors)]


def _form_of(tensor: Tensor, is_of_any_size: bool) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (object(),)  # such a tensor is never as it was
    sizes = (tensor.dim(),) if is_of_any_size else (tensor.shape, tensor.stride())
    return (
        type(tensor), tensor.dtype, tensor.device, *sizes, tensor.requires_grad, tensor.is_neg(), tensor.is_conj(),
        tensor._is_zerotensor(), tensor.is_inference(),
    )  # fmt: skip
