"""Sizes that remember: values as an integer's, expressions that hold for other calls, guards that tell which ones."""

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_fast.triton._launch import ceil_div
from bert_fast.triton._sizes import Numbers, Size, evaluate, larger, smaller

OPERATIONS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": smaller,
    "max": larger, "ceil": ceil_div,
}  # fmt: skip
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(1, 40)), max_size=8
)
calls = st.tuples(st.integers(1, 5000), st.integers(1, 300))


def compute(arguments: Any, chosen: Any) -> list[Any]:
    """What the steps come to: each of a value so far and another, or a constant."""
    values = list(arguments)
    for name, i, j, constant in chosen:
        a, b = values[i % len(values)], values[j % len(values)] if j % 2 else constant
        try:
            values.append(OPERATIONS[name](a, b))
        except ZeroDivisionError:
            values.append(a)
    return values


def holds(numbers: Numbers, values: list[int]) -> bool:
    return all(values[place] == wanted for place, wanted in numbers.guards.items())


@given(steps, calls, calls)
def test_expressions_are_those_of_other_calls_too(chosen: Any, call: Any, other: Any) -> None:
    numbers = Numbers(call)
    made = compute(numbers.arguments, chosen)
    assert [int.__index__(one.value if isinstance(one, Size) else one) for one in made] == compute(call, chosen)
    values = evaluate(tuple(numbers.expressions), other)
    if holds(numbers, values):
        expected = compute(other, chosen)
        assert [values[one.place] if isinstance(one, Size) else one for one in made] == expected


@given(st.sampled_from(COMPARISONS), st.booleans(), st.integers(1, 600), calls, calls)
def test_guards_tell_calls_of_other_answers(
    compare: Any, is_constant: bool, constant: int, call: Any, other: Any
) -> None:
    numbers = Numbers(call)
    first, second = numbers.arguments
    answer = compare(first, constant if is_constant else second)
    assert answer is compare(call[0], constant if is_constant else call[1])
    values = evaluate(tuple(numbers.expressions), other)
    assert holds(numbers, values) is (compare(other[0], constant if is_constant else other[1]) is answer)


def test_a_size_compared_with_itself_asks_nothing() -> None:
    numbers = Numbers((5,))
    (size,) = numbers.arguments
    again = size + 3
    assert again == 3 + size and size <= size and not size < size and size >= size and not size > size
    assert max(size, size) is size and not numbers.guards


@pytest.mark.parametrize("use", [int, float, operator.index, lambda size: list(range(10))[size]])
def test_what_needs_the_value_is_for_that_value_alone(use: Any) -> None:
    numbers = Numbers((5,))
    use(numbers.arguments[0])
    assert holds(numbers, evaluate(tuple(numbers.expressions), (5,)))
    assert not holds(numbers, evaluate(tuple(numbers.expressions), (6,)))


def test_nothing_is_remembered_for_a_size() -> None:
    (size,) = Numbers((5,)).arguments
    with pytest.raises(TypeError, match="unhashable"):
        hash(size)


def test_a_divisor_of_another_call_that_is_zero_is_no_error() -> None:
    numbers = Numbers((12, 4))
    made = numbers.arguments[0] // numbers.arguments[1]
    assert made.value == 3 and not holds(numbers, evaluate(tuple(numbers.expressions), (12, 0)))
    of_negative = Numbers((12, -4))
    assert (of_negative.arguments[0] % of_negative.arguments[1]).value == 0
    assert not holds(of_negative, evaluate(tuple(of_negative.expressions), (12, 0)))


def test_a_size_is_never_compared_with_a_float_unseen() -> None:
    (size,) = Numbers((3,)).arguments
    for compare in COMPARISONS:
        with pytest.raises(TypeError):
            compare(size, 3.0)


def test_bit_length_is_for_all_sizes_of_as_many_bits() -> None:
    numbers = Numbers((100,))
    assert numbers.arguments[0].bit_length() == 7
    found = [n for n in range(300) if holds(numbers, evaluate(tuple(numbers.expressions), (n,)))]
    assert found == list(range(64, 128))
