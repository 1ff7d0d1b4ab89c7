"""What follows from the form of tensors alone, worked out once for tensors that come again, as parameters do.

Whether tensors are as they were is asked in one call, a microsecond for sixteen: the one with which `torch.compile`
finds out whether what it compiled still fits. Dynamo itself is not imported.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.addresses import reader

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
        self._known: dict[tuple[int, ...], tuple[_Guard, bytes | None, Any]] = {}

    def __call__(self, group: _Group) -> Any:
        """What the function returns for the group."""
        key = tuple(map(id, group))
        tensors: Sequence[Any] = [one for one in group if one is not None] if _ID_OF_NONE in key else group
        known = self._known.get(key)
        if known is not None:
            guard, addresses, result = known
            if guard(*tensors) and (addresses is None or addresses == reader().addresses(tensors)):
                return result
        result = self._function(group)
        addresses = reader().addresses(tensors) if self._by_address else None
        if len(self._known) >= _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = guard_of(tensors), addresses, result
        return result


def guard_of(tensors: Sequence[Tensor], free: Sequence[Sequence[bool]] = ()) -> _Guard:
    """Whether as many tensors have the form of these.

    free: of the first tensors, for each dimension whether any size will do; then any strides of those before it will.
    """
    if _has_guards() and tensors and len({*map(id, tensors)}) == len(tensors):  # the same one twice is never as it was
        sizes = strides = None
        if free:
            forms = _sizes_and_strides(tensors, free)
            sizes, strides = [form[0] for form in forms], [form[1] for form in forms]
        guard: _Guard = _guards()(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return guard
    found = _forms_of(tensors, free)
    return lambda *others: found == _forms_of(others, free)


def _sizes_and_strides(
    tensors: Sequence[Tensor], free: Sequence[Sequence[bool]]
) -> list[tuple[list[int | None], list[int | None]]]:
    """Sizes and strides of each tensor, with None in the place of every free one."""
    made = []
    for tensor, ones in itertools.zip_longest(tensors, free, fillvalue=()):
        are_free = ones or [False] * tensor.dim()  # type: ignore[union-attr]
        sizes = [None if one else size for one, size in zip(are_free, tensor.shape, strict=True)]  # type: ignore[union-attr]
        strides = [
            None if any(are_free[place + 1 :]) else stride
            for place, stride in enumerate(tensor.stride())  # type: ignore[union-attr]
        ]
        made.append((sizes, strides))
    return made


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
        check = _guards()(
            one, other, dynamic_dims_sizes=[[None] * 2, [3, 2]], dynamic_dims_strides=[[None] * 2, [2, 1]]
        ).check
        return check(other.t(), other) is True and check(one, one) is False and check(one[0], other) is False
    except (ImportError, TypeError, AttributeError):
        return False


def _forms_of(tensors: Sequence[Tensor], free: Sequence[Sequence[bool]]) -> list[tuple[Any, ...]]:
    if any(one.layout is not torch.strided or one.is_nested for one in tensors):
        return [(object(),)]  # such a tensor is never as it was
    try:
        sizes = _sizes_and_strides(tensors, free)
    except ValueError:  # another number of dimensions
        return [(object(),)]
    return [_form_of(one, *its) for one, its in zip(tensors, sizes, strict=True)]


def _form_of(tensor: Tensor, *sizes: Any) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.dtype, tensor.device, *sizes, tensor.requires_grad, tensor.is_neg(), tensor.is_conj(),
        tensor._is_zerotensor(), tensor.is_inference(),
    )  # fmt: skip
