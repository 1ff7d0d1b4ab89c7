"""Numbers in texts: as people write them, not all that Python takes."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from bert_fast.numerals import parsed_integer, parsed_number, table_number


@pytest.mark.parametrize(("text", "number"), [("5", 5), (" -12\n", -12), ("+0", 0), ("007", 7)])
def test_integers(text: str, number: int) -> None:
    assert parsed_integer(text) == number == parsed_number(text)


@pytest.mark.parametrize("text", ["", " ", "1_000", "1e3", "5.0", "٣", "５", "0x10", "inf", "nan", "- 5", "1 0", "²"])
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number, got "):
        parsed_integer(text)


@pytest.mark.parametrize(("text", "number"), [("3e-5", 3e-5), (" .5 ", 0.5), ("-1E2", -100.0), ("inf", math.inf)])
def test_numbers(text: str, number: float) -> None:
    assert parsed_number(text) == number


@pytest.mark.parametrize("text", ["", "1_0e-5", "٣", "５.5", "fast", "1,5", "0x10"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|could not convert"):
        parsed_number(text)
    assert math.isnan(table_number(text))


@pytest.mark.parametrize(
    "value",
    [
        None, True, "nan", "inf", math.nan, -math.inf, 1e39, pytest.param(10**400, id="10 ** 400"), [], "1_000",
        b"1"[:0],
    ],
)  # fmt: skip
def test_values_that_fp32_cannot_hold(value: Any) -> None:
    assert math.isnan(table_number(value))


@pytest.mark.parametrize("value", [2, "2", 2.0, np.float32(2), np.int8(2), Fraction(2)])
def test_values_of_tables(value: Any) -> None:
    assert table_number(value) == 2
    assert table_number(float(np.finfo(np.float32).max)) == np.finfo(np.float32).max
