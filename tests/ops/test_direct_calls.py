"""Registered ops called by themselves, past the public functions: what does not fit is refused, by name."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops._signature import checker

from .test_every_op import SAMPLES, record


def damaged_tensors(t: Tensor) -> Iterator[Tensor]:
    """Another size, rank, dtype, device or layout, other values: most of it wrong, some of it only unusual."""
    yield t[None]
    yield t.to("meta")
    for dtype in (torch.float16, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64):
        yield t.to(dtype)
    if t.dim():
        yield from (t[:0], t[:-1], torch.cat([t, t]), t.to_sparse(), torch.stack([t, t], -1)[..., 0])
    if t.dim() > 1:
        yield from (t[..., :-1], t.flatten())
    if t.is_floating_point():
        yield torch.full_like(t, torch.nan)
    else:
        yield from (torch.full_like(t, value) for value in (-7, min(2**31 - 1, torch.iinfo(t.dtype).max)))


def damaged(argument: Any, is_optional: bool) -> Iterator[Any]:
    if isinstance(argument, Tensor):
        yield from damaged_tensors(argument)
        yield from [None] if is_optional else []
    elif isinstance(argument, list):
        yield []
        if argument:
            yield from ([t] for t in damaged_tensors(argument[0]))
    elif isinstance(argument, bool):
        yield not argument
    elif isinstance(argument, int):
        yield from (-1, 0, 10**6, 2**62, -(2**63))
    elif isinstance(argument, float):
        yield from (-1.0, 2.0, torch.nan, torch.inf)
    elif isinstance(argument, str):
        yield "nonsense"


def copied(argument: Any) -> Any:
    if isinstance(argument, list):
        return [t.clone() for t in argument]
    return argument.clone() if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("back_end", ["torch", "reference"])
def test_one_argument_that_does_not_fit(back_end: str, name: str) -> None:
    """Each in turn; what is not refused is computed without harm, and as what it was asked for."""
    with backend.use_backend(back_end):
        calls = record(SAMPLES[name])
    refused, unnamed = 0, []
    for func, arguments in calls.values():
        schema = func._schema.arguments
        for place, argument in enumerate(arguments):
            for other in damaged(argument, str(schema[place].type).startswith("Optional")):
                given = [copied(a) for a in arguments]
                given[place] = other
                try:
                    func(*given)
                except (TypeError, ValueError, BackendError) as error:
                    refused += 1
                    first_word = re.match(r"\w*", str(error))[0]
                    if first_word not in {"betas", *backend.op_names(), *(a.name for a in schema)}:
                        unnamed.append(f"{func}, {schema[place].name}: {error}")
    assert refused > 10 and not unnamed


def of_checker(tensors: dict[str, str]) -> Callable[..., None]:
    return checker(lambda x, weight, statistics, ids: None, tensors, None)


CHECK = of_checker({"x": "x T 2N+", "weight": "p N _", "statistics": "s T", "ids": "int T"})
X, WEIGHT, STATISTICS, IDS = torch.zeros(3, 4).half(), torch.zeros(2, 7), torch.zeros(3), torch.zeros(3).int()


def test_signatures_that_fit() -> None:
    CHECK(X, WEIGHT, STATISTICS, IDS)
    CHECK(X, WEIGHT.half(), STATISTICS, IDS.long())
    CHECK(X[:0], None, STATISTICS[:0], None)
    CHECK(X.double(), WEIGHT.double(), STATISTICS.double(), IDS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({0: X[:, :3]}, ValueError, r"x: expected a multiple of 2 for N, got shape \[3, 3\]"),
        ({0: X[:, :0]}, ValueError, r"x: expected at least 1 for N, got shape \[3, 0\]"),
        ({0: X.bool()}, TypeError, "x: expected dtype float32 or float16"),
        ({0: X.float(), 1: WEIGHT.half()}, TypeError, "weight: expected dtype float32, got float16"),
        ({1: WEIGHT[:1]}, ValueError, r"weight: expected shape \[2, _\], got \[1, 7\]"),
        ({1: WEIGHT.to_sparse()}, TypeError, "weight: expected a dense Tensor, got layout sparse_coo"),
        ({2: STATISTICS.half()}, TypeError, "statistics: expected dtype float32, got float16"),
        ({2: STATISTICS.to("meta")}, ValueError, r"statistics: expected device cpu \(that of x\), got meta"),
        ({3: IDS[:2]}, ValueError, r"ids: expected shape \[3\], got \[2\]"),
        ({3: [0, 0, 0]}, TypeError, "ids: expected a Tensor, got list"),
    ],
    ids=[
        "odd", "no columns", "bool", "narrow weight", "short weight", "sparse", "half statistics", "meta", "short ids",
        "list",
    ],
)  # fmt: skip
def test_signatures_that_do_not_fit(changes: dict[int, Any], error: type[Exception], message: str) -> None:
    arguments = [X, WEIGHT, STATISTICS, IDS]
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(error, match=message):
        CHECK(*arguments)
