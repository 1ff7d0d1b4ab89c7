"""Triton's interpreter with types of blocks made once for each shape and dtype, and sums of whole slices.

Beside `bert_fast.testing.interpreter.spare_repetition`, which leaves out other work.
"""

import builtins
from functools import cache
from typing import Any


def spare_more() -> None:
    """From here on the interpreter needs two thirds of its time, for the same bits. TRITON_INTERPRET must be 1."""
    _make_types_once()
    _combine_slices()


def _make_types_once() -> None:
    """Every operation makes types of blocks and tensors: it unwraps their shapes, checks that the sizes are powers of
    two, and wraps the shapes again. Nothing writes to a shape that was made.
    """
    import triton.language.core as tl
    from triton._utils import validate_block_shape
    from triton.language.semantic import TritonSemantic

    @cache
    def of_shape(sizes: builtins.tuple[int, ...]) -> Any:
        """(shape of a type, number of elements, shape of a tensor, the same number for kernels)."""
        numel = validate_block_shape(sizes)
        return tl.tuple(sizes), numel, tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)

    @cache
    def name_of(element_name: str, sizes: builtins.tuple[int, ...]) -> str:
        return f"<{of_shape(sizes)[0]}, {element_name}>"

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size if type(size) is int else tl._unwrap_if_constexpr(size) for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensors = of_shape(sizes)
        self.name = name_of(element_ty.name, sizes)

    no_sizes = tl.tuple([]), tl.constexpr(1)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else no_sizes

    equal, equal_dtype = tl.tuple.__eq__, tl.dtype.__eq__

    def equal_sizes(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, tl.tuple) else other
        if isinstance(values, list) and all(type(value) is int for value in values):
            return tl.constexpr(self.values == values)  # nothing to unwrap
        return equal(self, other)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        is_same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    tl.tuple.__eq__ = equal_sizes
    tl.dtype.__eq__ = lambda self, other: self is other or equal_dtype(self, other)
    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)


def _combine_slices() -> None:
    """`tl.reduce` with a function of the kernel combines slices along the axis, in the same order, not numbers."""
    import numpy as np
    from triton.runtime.interpreter import ReduceOps

    by_numbers = ReduceOps.generic_reduce

    def by_slices(self: Any, operands: Any) -> Any:
        first = operands[0].handle.data
        if self.axis is None or first.ndim == 1:
            return by_numbers(self, operands)
        found = None
        for index in range(first.shape[self.axis]):
            part = [self.to_tensor(one.handle.data.take(index, self.axis), one.dtype) for one in operands]
            if found is not None:
                made = self.combine_fn.fn(*found, *part)
                made = made if isinstance(made, tuple) else (made,)
                part = [self.to_tensor(new.handle.data, one.dtype) for new, one in zip(made, operands, strict=True)]
            found = part
        data = [one.handle.data for one in found or ()]
        if self.keep_dims:
            data = [np.expand_dims(values, self.axis) for values in data]
        return [self.to_tensor(values, one.dtype) for values, one in zip(data, operands, strict=True)]

    ReduceOps.generic_reduce = by_slices
