"""Triton's compiler is needed, its interpreter is not."""

import importlib.util
import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter takes the compiler's place")
