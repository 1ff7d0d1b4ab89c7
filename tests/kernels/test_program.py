"""What programs are made of."""

import dataclasses

import pytest
import torch

from bert_fast.env import SETTINGS
from bert_fast.triton import _products
from bert_fast.triton._products import with_products
from bert_fast.triton._program import (
    Argument,
    Call,
    Empty,
    Matrix,
    Product,
    Program,
    What,
    part_of,
    scratch_of,
    steps_of,
)  # fmt: skip
from bert_fast.triton._sizes import Expression


def test_views_without_the_function_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_fast.triton._program import _find_part_of

    x = torch.arange(24.0)[2:]
    known = _find_part_of()
    monkeypatch.delattr(torch._C._dynamo.guards, "_reinterpret_tensor")
    views = [find(x, (4, 2), (1, 5), 3) for find in (known, _find_part_of())]
    assert _find_part_of() is not known
    assert torch.equal(*views) and views[0].stride() == views[1].stride() == (1, 5)
    assert views[0].data_ptr() == views[1].data_ptr() == x[3:].data_ptr()


def _program(*order: What, outputs: tuple[int, ...] = (), num_inputs: int = 1) -> Program:
    return Program(num_inputs, 9, (), (), steps_of(order, num_inputs, outputs), outputs)


def _view(source: int, made: int) -> Call:
    return Call(part_of, (Argument("slot", source), Argument("number", 0)), (), (made,))


def _call(*slots: int, made: tuple[int, ...] = (), product: Product | None = None) -> Call:
    return Call(torch.mm, tuple(Argument("slot", slot) for slot in slots), (), made, product)


def _product(out: int) -> Product:
    a, b = Matrix(0, 0, 0, False, torch.float32), Matrix(1, 0, 0, False, torch.float32)
    return Product(a, b, a._replace(slot=out), None, 0, 0, 0, accumulates=False, allows_tf32=False)


def _empty(slot: int) -> Empty:
    return Empty(slot, (0, 0), torch.float32)


def test_steps_leave_out_what_nobody_reads() -> None:
    order = (_empty(1), _empty(2), _view(1, 3), _view(2, 4), _call(3, made=(5,)), _call(0, made=(6,)))
    steps = steps_of(order, 1, (5,))
    assert [step.what for step in steps] == [_empty(1), _view(1, 3), _call(3, made=(5,)), _call(0, made=(6,))]
    assert [step.last_used for step in steps] == [(), (1,), (3,), (6,)], "slots are freed by their last step"


def test_scratch_is_memory_that_stays_within_a_program() -> None:
    one = _program(_empty(1), _view(1, 2), _view(2, 3), _call(0, 3), _empty(4), outputs=(4,))
    assert scratch_of(one) == (1, 2, 3)
    of_an_output = _program(_empty(1), _view(1, 2), _view(2, 3), _view(1, 4), _call(0, 4), outputs=(3,))
    assert scratch_of(of_an_output) == (), "a view of it is an output, and others are views of the same memory"
    assert scratch_of(_program(_empty(1), _call(1, made=(2,)), outputs=(2,))) == (), "it may be its own argument"
    product = _call(0, 1, made=(2,), product=_product(2))
    assert scratch_of(_program(_empty(1), product, outputs=(2,))) == (1,), "which is a tensor of its own"
    assert scratch_of(_program(_view(0, 1), _call(1))) == (), "a view of an input"


def test_products_take_the_place_of_calls_and_of_views_for_them() -> None:
    order = (_view(1, 5), _call(0, 5, made=(2,), product=_product(2)), _view(2, 3), _call(3, made=(4,)))
    made = with_products(_program(*order, outputs=(4,), num_inputs=2))
    workspace, memory, product, *others = (step.what for step in made.steps)
    assert isinstance(workspace, Empty) and workspace.dtype == torch.uint8 and workspace.slot == 9
    assert made.num_slots == 10 and made.expressions == (Expression("constant", 32 << 20),)
    assert memory == _empty(2) and others == [*order[2:]]
    assert product == _product(2)._replace(workspace=(9, 0))
    assert made.steps[2].last_used == (9,)
    without = _program(_call(0, made=(4,)), outputs=(4,))
    assert with_products(without).steps == without.steps


def test_an_unknown_maker_of_products_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_products, "SETTINGS", dataclasses.replace(SETTINGS, products="cublas"))
    with pytest.raises(ValueError, match="BERT_FAST_PRODUCTS: expected cublaslt or nothing, got 'cublas'"):
        _products.are_by_address()
