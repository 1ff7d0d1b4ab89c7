"""The C++ extension with each of its instruction sets."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from bert_fast import native as native_loader


@pytest.fixture(params=["avx512", "avx2", "portable"])
def native(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The extension with one instruction set forced."""
    module = native_loader.load()
    if module is None:
        pytest.skip(str(native_loader.unavailable_reason()))
    if request.param not in module.simd_levels():
        pytest.skip(f"this processor or build has no {request.param}")
    module.force_simd_level(request.param)
    # The tensors are tiny: PyTorch's own threads would only wait for each other. The routines are told their number.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(num_threads)
    module.force_simd_level("auto")
