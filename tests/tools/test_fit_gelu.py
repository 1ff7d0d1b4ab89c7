"""The generator of GELU's short form: it is exact where it must be, and the kernels hold what it prints."""

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bert_fast.testing.tolerances import SHORT_FORM_UNITS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_gelu", ROOT / "tools" / "fit_gelu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_kernels_hold_the_coefficients(tool: ModuleType, dtype: str) -> None:
    degree, end, log2_normal, _ = tool.TYPES[dtype]
    q, _ = tool.fit(degree, end, log2_normal)
    source = (ROOT / "bert_fast" / "triton" / "_activations.py").read_text(encoding="utf-8")
    held = {float(number) for number in re.findall(r"\d\.\d+e[-+]?\d+", source)}
    for coefficient in tool.monomials(q, end):
        assert float(f"{abs(coefficient):.9e}") in held


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_fit(tool: ModuleType, dtype: str) -> None:
    degree, end, log2_normal, bits = tool.TYPES[dtype]
    q, error = tool.fit(degree, end, log2_normal)
    assert error * 2**bits < SHORT_FORM_UNITS[getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype])]
    p = tool.monomials(q, end)

    def value(a: float) -> float:
        return sum(c * a**power for power, c in enumerate(p))

    assert value(tool.ROOT) == pytest.approx(math.log2(tool.lower_tail(tool.ROOT)))
    assert tool.lower_tail(tool.ROOT) == pytest.approx(tool.ROOT * tool.density(tool.ROOT))
    # Times SCALE = 2^24 and without flushing, 2^p must be 0 from CLAMP on.
    assert value(tool.CLAMP) + 24 < -149
    assert tool.fit(degree - 1, end, log2_normal)[1] > error
