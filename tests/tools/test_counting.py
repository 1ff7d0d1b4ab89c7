"""Python calls of a step are those of the package alone, and each counts."""

import json

import pytest


def test_calls_are_those_of_the_package() -> None:
    pytest.importorskip("triton", reason="what is counted over is Triton's driver")
    from bert_fast.reference.dropout import dropout_scale
    from tools.null_driver.counting import calls_of

    assert calls_of(lambda: dropout_scale(0.1)) == 2
    assert calls_of(lambda: json.dumps({})) == 0
