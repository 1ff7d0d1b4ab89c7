"""A cuBLASLt for machines without a GPU: what programs ask it to multiply is checked and noted.

products = NullProducts()          # in a process that started the null driver, before the first product
...
products.log()
"""

import ctypes
import os
from typing import NamedTuple

import torch

from tools.null_driver import build

_DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
_TF32 = 77


class Matrix(NamedTuple):
    """A row-major matrix, column-major if transposed. leading: elements from one row (column) to the next."""

    address: int
    dtype: torch.dtype
    is_transposed: bool
    leading: int


class Product(NamedTuple):
    """out = a b + bias, or out += a b; bias is an address or 0.

    reduction: how partial sums may be added, a mask of the library's (`cublasLtReductionScheme_t`).
    """

    rows: int
    inner: int
    cols: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: int
    accumulates: bool
    is_tf32: bool
    reduction: int = 0
    stream: int = 0


class _Operation(ctypes.Structure):
    _fields_ = (
        ("compute_type", ctypes.c_int32), ("scale_type", ctypes.c_int32), ("transposes_a", ctypes.c_int32),
        ("transposes_b", ctypes.c_int32), ("epilogue", ctypes.c_uint32), ("bias", ctypes.c_uint64),
    )  # fmt: skip


class _Layout(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32), ("rows", ctypes.c_uint64), ("cols", ctypes.c_uint64), ("leading", ctypes.c_int64),
    )  # fmt: skip


class _Product(ctypes.Structure):
    _fields_ = (
        ("operation", _Operation), ("a", _Layout), ("b", _Layout), ("c", _Layout),
        ("alignments", ctypes.c_uint32 * 4), ("reduction", ctypes.c_uint32),
        ("a_address", ctypes.c_uint64), ("b_address", ctypes.c_uint64), ("c_address", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64), ("workspace_bytes", ctypes.c_uint64), ("stream", ctypes.c_uint64),
        ("alpha", ctypes.c_float), ("beta", ctypes.c_float),
    )  # fmt: skip


class NullProducts:
    """The log of the library: products, searches for algorithms and refusals since the last `reset`."""

    def __init__(self) -> None:
        name = "libcublasLt.so.13"
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            pass
        else:
            raise RuntimeError(f"this process has loaded {name} already")
        self._lib = ctypes.CDLL(str(build.cublaslt() / name))
        self._lib.null_products.restype = ctypes.POINTER(_Product)
        for of in ("products", "searches", "product_refusals"):
            getattr(self._lib, f"null_num_{of}").restype = ctypes.c_size_t
        self._lib.null_last_product_refusal.restype = ctypes.c_char_p
        for of in ("compute", "have_no_algorithm"):
            getattr(self._lib, f"null_products_{of}").argtypes = (ctypes.c_bool,)

    def reset(self) -> None:
        """Forgets all of it."""
        self._lib.null_products_reset()

    def compute(self, wanted: bool = True) -> None:
        """Whether products are computed, in memory of the host and one element after the other."""
        self._lib.null_products_compute(wanted)

    def have_no_algorithm(self, wanted: bool = True) -> None:
        """Whether the library has none for any product that it has not been asked for."""
        self._lib.null_products_have_no_algorithm(wanted)

    def fail(self, status: int) -> None:
        """Makes the next product fail."""
        self._lib.null_products_fail(status)

    @property
    def num_searches(self) -> int:
        """How often an algorithm was asked for."""
        return self._lib.null_num_searches()

    @property
    def refusals(self) -> tuple[int, str]:
        """How many calls were refused, and why the last one was."""
        return self._lib.null_num_product_refusals(), self._lib.null_last_product_refusal().decode()

    def log(self) -> list[Product]:
        """All products, in their order."""
        found = self._lib.null_products()
        return [_product(found[i]) for i in range(self._lib.null_num_products())]


def _product(one: _Product) -> Product:
    """As the caller of a row-major product sees it: the library multiplies b's columns with a's."""
    operation = one.operation
    inner = one.a.cols if not operation.transposes_a else one.a.rows

    def matrix(layout: _Layout, address: int, is_transposed: int) -> Matrix:
        return Matrix(address, _DTYPES[layout.type], bool(is_transposed), layout.leading)

    return Product(
        rows=one.c.cols, inner=inner, cols=one.c.rows,
        a=matrix(one.b, one.b_address, operation.transposes_b),
        b=matrix(one.a, one.a_address, operation.transposes_a),
        out=matrix(one.c, one.c_address, False),
        bias=operation.bias, accumulates=one.beta == 1, is_tf32=operation.compute_type == _TF32,
        reduction=one.reduction, stream=one.stream,
    )  # fmt: skip
