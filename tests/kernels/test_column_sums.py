"""Sums of partial sums, in the interpreter: launched one by one and together, with the same bits."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend

pytestmark = pytest.mark.interpreter

# Programs, sums, columns: the sizes of tiles (256 programs, 32 columns) and their neighbours.
SHAPES = [(1, 3, 33), (256, 1, 67), (257, 3, 31), (2, 2, 1), (255, 1, 32), (5, 3, 64), (3, 2, 33)]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def module():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    backend.resolve("layer_norm", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")
    from bert_fast.triton import _column_sums

    return _column_sums


@pytest.fixture
def launched(module, monkeypatch: pytest.MonkeyPatch) -> list[int]:  # type: ignore[no-untyped-def]
    """Of every launch, how many tensors of partial sums it had."""
    counts: list[int] = []

    def counting(plan: Any, grid: Any, operands: Any, numbers: Any = ()) -> None:
        counts.append(sum(number > 0 for number in numbers))
        launch(plan, grid, operands, numbers)

    launch = module.LaunchPlan.__call__
    monkeypatch.setattr(module.LaunchPlan, "__call__", counting)
    return counts


def partials(num_tensors: int) -> list[Tensor]:
    return [torch.randn(shape) for shape in SHAPES[:num_tensors]]


def together(module: Any, given: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The sums of all, in dtypes by turns."""
    with module.launched_together():
        return [module.column_sums(partial, DTYPES[i % 2]) for i, partial in enumerate(given)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_alone(module, shape, dtype):  # type: ignore[no-untyped-def]
    partial = torch.randint(-8, 9, shape).float()  # whole numbers, whose sums fp32 holds in any order
    sums = module.column_sums(partial, dtype)
    assert [one.shape for one in sums] == [(shape[2],)] * shape[1]
    assert torch.equal(torch.stack(sums), partial.double().sum(0).to(dtype))


@pytest.mark.parametrize("num_tensors", range(len(SHAPES) + 1))
def test_together_they_have_the_bits_that_they_have_alone(module, launched, num_tensors):  # type: ignore[no-untyped-def]
    given = partials(num_tensors)
    made = together(module, given)
    assert launched == [3] * (num_tensors // 3) + [num_tensors % 3] * (num_tensors % 3 > 0)
    for i, (partial, sums) in enumerate(zip(given, made, strict=True)):
        alone = module.column_sums(partial, DTYPES[i % 2])
        assert len(sums) == len(alone) == SHAPES[i][1]
        assert all(map(torch.equal, sums, alone)), SHAPES[i]


def test_what_is_not_finite_stays_in_its_columns(module):  # type: ignore[no-untyped-def]
    given = partials(3)
    expected = together(module, given)
    given[1][3, 0, 66] = float("inf")
    given[2][256, 2, 0] = float("nan")
    made = together(module, given)
    assert made[1][0][66] == float("inf") and made[2][2][0].isnan()
    made[1][0][66], made[2][2][0] = expected[1][0][66], expected[2][2][0]
    for ours, theirs in zip(made, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_nothing_is_launched_before_the_end_nor_after_an_error(module, launched):  # type: ignore[no-untyped-def]
    given = partials(2)
    with pytest.raises(ZeroDivisionError), module.launched_together():  # noqa: PT012
        module.column_sums(given[0], torch.float32)
        assert launched == []
        raise ZeroDivisionError
    assert launched == []
    (alone,) = module.column_sums(given[1], torch.float32)
    assert launched == [1] and not alone.isnan().any()
    together(module, given)
    assert launched == [1, 2], "what an error left over is forgotten"


def test_a_context_within_another_launches_its_own(module, launched):  # type: ignore[no-untyped-def]
    given = partials(4)
    with module.launched_together():
        first = module.column_sums(given[0], torch.float32)
        within = together(module, given[1:3])
        assert launched == [2] and not within[0][0].isnan().any() and first[0].isnan().all()
        last = module.column_sums(given[3], torch.float32)
    assert launched == [2, 2]
    assert torch.equal(first[2], module.column_sums(given[0], torch.float32)[2])
    assert torch.equal(last[1], module.column_sums(given[3], torch.float32)[1])


def test_another_thread_waits_for_nobody(module, launched):  # type: ignore[no-untyped-def]
    given = partials(2)
    made: list[tuple[Tensor, ...]] = []
    with module.launched_together():
        module.column_sums(given[0], torch.float32)
        thread = threading.Thread(target=lambda: made.append(module.column_sums(given[1], torch.float32)))
        thread.start()
        thread.join()
        assert launched == [1] and not made[0][0].isnan().any()
    assert launched == [1, 1]


@pytest.mark.parametrize("shape", [(1, 33), (255, 16), (256, 17), (1025, 15), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows(module, shape, dtype):  # type: ignore[no-untyped-def]
    rows = torch.randint(-8, 9, shape).to(dtype)  # whole numbers, whose sums fp32 holds in any order
    made = module.row_sums(rows, torch.float32)
    assert torch.equal(made, rows.double().sum(0).float())


@pytest.mark.parametrize("num_tensors", [0, 1, 2, 3, 4])
def test_rows_share_a_launch_with_two_or_three_others(module, num_tensors):  # type: ignore[no-untyped-def]
    given, rows = partials(num_tensors), torch.randn(300, 80).half()[:, :50]
    with module.launched_together():
        sums = [module.column_sums(partial, torch.float32) for partial in given]
        first, second = (module.row_sums(one, torch.float16) for one in (rows, -rows))
        assert first.isnan().all(), "nothing is launched yet"
    assert torch.equal(first, module.row_sums(rows, torch.float16)) and torch.equal(second, -first)
    assert torch.equal(first, module.row_sums(rows.clone(), torch.float32).half()), "rounded once, whatever its strides"
    for partial, made in zip(given, sums, strict=True):
        assert all(map(torch.equal, made, module.column_sums(partial, torch.float32)))


def test_rows_are_summed_in_fp32(module):  # type: ignore[no-untyped-def]
    """Half precision would stop at 2,048 ones."""
    assert module.row_sums(torch.ones(5000, 3).half(), torch.float32).tolist() == [5000.0] * 3


@pytest.mark.parametrize(
    ("num_groups", "rows", "of_fp32"), [(32768, 1, 512), (8192, 4, 512), (129, 1, 3), (40, 1, 2), (3, 128, 3)]
)
def test_programs_add_up_no_more_than_64_rows_of_fp32(module: Any, num_groups: int, rows: int, of_fp32: int) -> None:
    from bert_fast.triton._summing_programs import summing_programs

    fp32, half = (summing_programs(num_groups, rows, 1, dtype, torch.device("cpu")) for dtype in DTYPES)
    assert (fp32, half) == (of_fp32, 2), "the interpreter counts two multiprocessors"
