"""What programs are made of."""

import pytest
import torch


def test_views_without_the_function_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_fast.kernels._program import _find_part_of

    x = torch.arange(24.0)[2:]
    known = _find_part_of()
    monkeypatch.delattr(torch._C._dynamo.guards, "_reinterpret_tensor")
    views = [find(x, (4, 2), (1, 5), 3) for find in (known, _find_part_of())]
    assert _find_part_of() is not known
    assert torch.equal(*views) and views[0].stride() == views[1].stride() == (1, 5)
    assert views[0].data_ptr() == views[1].data_ptr() == x[3:].data_ptr()
