"""What the tests of products by cuBLASLt run over the null driver and a cuBLASLt that notes them, as `scenarios.py`."""

import copy
import functools
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor

from tests.null_driver.layer_scenarios import NUM_BATCHES, _batch, _difference, _models, _words
from tools.null_driver.driver import NullDriver
from tools.null_driver.products import Matrix, NullProducts, Product

_STREAM = 7
_SUMS_IN_FP32 = 2
_SIZES = (1, 3, 8, 17, 32, 64)


def _by_address() -> NullProducts:
    """Has programs call a library that is there from now on; before bert_fast is imported."""
    products = NullProducts()
    os.environ["BERT_FAST_PRODUCTS"] = "cublaslt"
    import bert_fast  # noqa: F401  with the answers of a GPU

    return products


class _Seen(NamedTuple):
    """A product without addresses, of which four bits count."""

    sizes: tuple[int, int, int]
    matrices: tuple[Any, ...]
    has_bias: bool
    accumulates: bool


def _lie(matrix: Matrix, rows: int, cols: int) -> Any:
    """How a matrix lies; of one row or column, only how far its elements are apart."""
    across, down = (matrix.leading, 1) if matrix.is_transposed else (1, matrix.leading)
    place = matrix.dtype, matrix.address % 16
    if rows == 1 or cols == 1:
        return *place, "vector", across if cols > 1 else down if rows > 1 else 0
    return *place, "columns" if matrix.is_transposed else "rows", matrix.leading


def _seen(one: Product) -> _Seen:
    rows, inner, cols = one[:3]
    matrices = _lie(one.a, rows, inner), _lie(one.b, inner, cols), _lie(one.out, rows, cols)
    return _Seen((rows, inner, cols), matrices, one.bias != 0, one.accumulates)


class _Calls:
    """Products in their order: those of PyTorch's functions, and those that the library has noted.

    The functions are replaced from now on, also in programs that are made from now on.
    """

    def __init__(self, products: NullProducts) -> None:
        self._products = products
        self.reset()
        places = (torch, "mm"), (torch, "addmm"), (Tensor, "addmm_"), (torch.nn.functional, "linear")
        for owner, name in places:
            setattr(owner, name, self._noting(getattr(owner, name), name))

    def reset(self) -> None:
        self._products.reset()
        self._seen: list[_Seen] = []
        self._num_known = 0

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def note(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            if not isinstance(made, Tensor):  # a program is being made
                return made
            self._take_log()
            tensors = [one for one in (*args, kwargs.get("bias")) if one is not None]
            if name == "linear":
                x, weight, *added = tensors
                a, b, out = x.flatten(0, -2), weight.t(), made.flatten(0, -2)
            else:
                *added, a, b = tensors
                out = made
            has_bias = bool(added) and added[0].dim() == 1
            sizes, matrices = (a.shape[0], a.shape[1], b.shape[1]), map(_matrix, (a, b, out))
            self._seen.append(_seen(Product(*sizes, *matrices, int(has_bias), bool(added) and not has_bias, False)))
            return made

        return note

    def _take_log(self) -> None:
        log = self._products.log()
        self._seen += map(_seen, log[self._num_known :])
        self._num_known = len(log)

    def seen(self) -> tuple[list[_Seen], int]:
        """All, and how many of them the library has noted."""
        self._take_log()
        return self._seen, self._num_known


def _matrix(tensor: Tensor) -> Matrix:
    is_transposed = tensor.stride(1) != 1
    return Matrix(tensor.data_ptr(), tensor.dtype, is_transposed, tensor.stride(1 if is_transposed else 0))


def products_of_layers(driver: NullDriver) -> dict[str, Any]:
    """Launches and products of models with products by address, and those that differ from the ops'."""
    products = _by_address()
    from bert_fast.triton import encoder_layer
    from bert_fast.triton._programs import Programs

    is_all = os.environ.get("BERT_FAST_ALL_LAYERS") == "1"
    tables = encoder_layer._of_model, encoder_layer._forward, encoder_layer._backward
    rng, wrong, compared, num_by_address = random.Random(12), list[str](), 0, 0
    driver.note_parameters()
    calls = _Calls(products)

    def asked(run: Any, inputs: dict[str, Tensor]) -> tuple[list[Any], list[_Seen], int]:
        torch.manual_seed(1)
        driver.reset()
        calls.reset()
        run(copy.copy(inputs))
        launches = [
            (one.kernel, one.grid, one.threads, one.shared_bytes, _words(one.parameters))
            for one in driver.launches()
            if "column_sums" not in one.kernel  # programs may make several sums together
        ]
        return launches, *calls.seen()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (kind, run) in _models(is_all).items():
            for table in tables:
                table.forget()
            for number in range(NUM_BATCHES if is_all else 4):
                inputs = _batch(kind, rng)
                asked(run, inputs)  # a program's first run is Python's
                with mock.patch.object(Programs, "run", return_value=None):
                    launches, expected, _ = asked(run, inputs)
                found_launches, found, num_noted = asked(run, inputs)
                compared += len(expected)
                num_by_address += num_noted
                for what, ours, theirs in ("launches", found_launches, launches), ("products", found, expected):
                    if ours != theirs:
                        wrong.append(f"{name}, batch {number}, {what}: {_difference(ours, theirs)}")
    return {
        "wrong": wrong[:3], "num wrong": len(wrong), "compared": compared, "by address": num_by_address,
        "refusals": (*driver.refusals, *products.refusals),
    }  # fmt: skip


def _function(way: str) -> Callable[..., tuple[Tensor, ...]]:
    """A product of one way, and a kernel, without which there is no program in C++."""
    from bert_fast.triton import _gemm
    from bert_fast.triton._column_sums import column_sums

    def run(a: Tensor, b: Tensor, bias: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        if way == "with bias":
            made = _gemm.product(a, b, bias)
        elif way.startswith("added"):
            dtype = start.dtype if way == "added" else torch.float32
            out = start.new_zeros(start.shape, dtype=dtype).add_(start)
            made = _gemm.product(a, b, out=out, accumulate=True)
        else:
            made = _gemm.product(a, b, out_dtype=torch.float32 if way == "in fp32" else None)
        column_sums(start.float().view(start.shape[0], 1, start.shape[1]), torch.float32)
        return (made,)

    return run


def _operand(rows: int, cols: int, dtype: torch.dtype, lies: str) -> Tensor:
    """Of -1, 0 and 1, of which all sums here are exact."""
    if lies == "columns":
        return _operand(cols, rows, dtype, "rows").t()
    if lies == "within":
        return torch.randint(-1, 2, (rows, cols + 3)).to(dtype)[:, 1 : 1 + cols]
    return torch.randint(-1, 2, (rows, cols)).to(dtype)


def products_are_right(driver: NullDriver) -> dict[str, Any]:
    """Products of random shapes that the library computes, and those that are not PyTorch's."""
    products = _by_address()
    from bert_fast.triton import _gemm, _products
    from bert_fast.triton._programs import Programs

    torch.manual_seed(3)
    rng, wrong, counts = random.Random(4), list[str](), Counter[str]()
    programs = {
        way: Programs(_function(way), sizes={0: "T_", 3: "T_"}, settings=_products.settings)
        for way in ("plain", "with bias", "in fp32", "added", "added in fp32")
    }
    products.compute()
    triton.runtime.driver.active.get_current_stream = lambda device: _STREAM
    for number in range(300):
        way = rng.choice([*programs])
        dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
        inner, cols = rng.choice(_SIZES), rng.choice(_SIZES)
        lies = rng.choice(("rows", "columns", "within")), rng.choice(("rows", "columns", "within"))
        torch.backends.cuda.matmul.allow_tf32 = rng.random() < 0.5
        b, bias = _operand(inner, cols, dtype, lies[1]), _operand(1, cols, dtype, "rows")[0]
        for rows in (2, rng.randint(1, 70), rng.randint(1, 70)):
            a, start = _operand(rows, inner, dtype, lies[0]), _operand(rows, cols, dtype, "rows")
            expected = a.float() @ b.float() + {"with bias": bias, "plain": 0, "in fp32": 0}.get(way, start)
            with _gemm.by_library():
                programs[way]((a, b, bias, start))
                products.reset()
                (made,) = programs[way]((a, b, bias, start))
            case = f"{number}: {way}, {dtype}, [{rows}, {inner}] {lies[0]} and [{inner}, {cols}] {lies[1]}"
            if made.dtype != (torch.float32 if "fp32" in way else dtype) or not torch.equal(made.float(), expected):
                wrong.append(case)
            log = products.log()
            is_tf32 = torch.backends.cuda.matmul.allow_tf32 and dtype == torch.float32
            if {(one.is_tf32, one.reduction, one.stream) for one in log} - {(is_tf32, _SUMS_IN_FP32, _STREAM)}:
                wrong.append(f"{case}: TF32, reduction or stream")
            counts[way if log else "not by address"] += 1
    return {"wrong": wrong[:3], "counts": counts, "refusals": (*driver.refusals, *products.refusals)}


def product_faults(driver: NullDriver) -> dict[str, Any]:
    """Who makes a product where cuBLASLt does not, and what is raised where it fails."""
    products = _by_address()
    from bert_fast.triton import _gemm, _products
    from bert_fast.triton._programs import Programs

    found: dict[str, Any] = {}
    a, b = _operand(5, 8, torch.bfloat16, "rows"), _operand(8, 3, torch.bfloat16, "columns")
    bias, start = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(5, 3, dtype=torch.bfloat16)

    def programs() -> Callable[[Tensor], str]:
        """Of one product; what a call tells: "by address", "by PyTorch", an error."""
        made = Programs(_function("plain"), sizes={0: "T_", 3: "T_"}, settings=_products.settings)

        def call(a: Tensor) -> str:
            products.reset()
            with _gemm.by_library():
                try:
                    (product,) = made((a, b, bias, start[: len(a)]))
                except RuntimeError as error:
                    return str(error)
            if not products.log():
                return "by PyTorch" if torch.equal(product, a @ b) else "wrong"
            return "by address"

        return call

    call = programs()
    found["first and second run"] = [call(a), call(a)]
    num_searches = 0
    for _ in range(20):  # alignment of memory on the CPU varies, and is part of a form
        last = call(a)
        num_searches += products.num_searches
    found["searches for an algorithm"] = [num_searches < 5, last]
    found["no rows"] = call(a[:0])
    products.have_no_algorithm()
    found["no algorithm"] = [call(a[:4]), call(a[:4])]
    products.have_no_algorithm(wanted=False)
    found["known to have no algorithm"] = call(a[:4])
    found["others have one"] = call(a[:3])
    products.fail(13)
    found["fails"] = [call(a), call(a)]
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    found["accumulation in fp16"] = [call(a), call(a)]
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    with mock.patch.object(_products, "_are_tuned", return_value=True):
        found["tuned"] = [call(a), call(a)]
    found["again"] = call(a)
    _products._is_there.cache_clear()
    with mock.patch.object(_products.native, "load", return_value=None), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = programs()
        found["no library"] = [call(a), call(a)]
    found["warnings"] = [str(one.message) for one in caught]
    return found | {"refusals": (*driver.refusals, *products.refusals)}


PRODUCT_SCENARIOS: dict[str, Callable[[NullDriver], Any]] = {
    one.__name__: one for one in (products_of_layers, products_are_right, product_faults)
}
