"""The extension and the tensors' methods read the same addresses, sizes and contiguity."""

import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import addresses, native
from bert_fast.addresses import CONTIGUOUS, Reader, exchange, lie_of, numbers_of, reader

WHOLE = torch.arange(48, dtype=torch.float32)
TENSORS: dict[str, Tensor] = {
    "whole": WHOLE,
    "behind": WHOLE[3:],
    "columns": WHOLE.view(6, 8)[:, 2:5],
    "turned": WHOLE.view(6, 8).t(),
    "one row": WHOLE.view(6, 8)[::2][:1],
    "expanded": torch.ones(3, 1).expand(3, 4),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 5),
    "empty and turned": torch.empty(5, 0, 2).transpose(0, 2),
    "parameter": nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
    "of a graph": nn.Parameter(torch.ones(4)) * 2,
    "bool": torch.ones(7, dtype=torch.bool)[1:],
    "complex": torch.ones(2, dtype=torch.complex64),
}
READERS = [Reader(), reader()]


@pytest.fixture(params=READERS, ids=["by methods", "quickest"])
def one(request: pytest.FixtureRequest) -> Reader:
    return request.param


def test_the_extension_is_used_where_pytorch_has_the_table() -> None:
    has_functions = native.load() is not None and hasattr(Tensor, "__dlpack_c_exchange_api__")
    assert (exchange() is not None) == has_functions == (type(reader()) is not Reader)


def test_what_is_read_of_each_tensor(one: Reader) -> None:
    for name, tensor in TENSORS.items():
        assert numbers_of(one.addresses([tensor])) == [tensor.data_ptr()], name
        assert numbers_of(one.sizes((tensor,))) == [tensor.numel()], name
        lies = one.lies([tensor])[0]
        assert (lies % CONTIGUOUS, lies >= CONTIGUOUS) == (tensor.data_ptr() % 16, tensor.is_contiguous()), name


def test_lists_follow_one_another(one: Reader) -> None:
    first, second = list(TENSORS.values())[:4], tuple(TENSORS.values())[4:]
    assert one.addresses(first, second) == one.addresses([*first, *second])
    assert one.sizes(first, [], second) == struct.pack("13q", *[t.numel() for t in (*first, *second)])
    assert one.lies(first, second) == one.lies(first) + one.lies(second)
    assert one.addresses() == one.addresses([]) == one.lies([]) == b""
    assert len({one.addresses([t]) for t in (WHOLE, WHOLE[1:], WHOLE.clone())}) == 3


def test_tensors_are_alike(one: Reader) -> None:
    assert one.are_alike() and one.are_alike([]) and one.are_alike([WHOLE], (torch.ones(2, 2),))
    assert not one.are_alike([WHOLE, WHOLE.double()]) and not one.are_alike([WHOLE], [WHOLE.view(6, 8).t()])
    assert not one.are_alike([torch.ones(1, dtype=torch.int32), torch.ones(1)])


@pytest.mark.skipif(exchange() is None, reason="the extension or PyTorch has no exchange of functions")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([WHOLE], "expected lists and tuples, got Tensor"), ([{1: WHOLE}], "expected lists and tuples, got dict"),
        ([[WHOLE, None]], "expected lists of tensors, got NoneType"),
        ([[WHOLE], [3]], "expected lists of tensors, got int"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_refused(given: Any, error: str) -> None:
    for name in ("addresses", "sizes", "lies", "are_alike"):
        with pytest.raises(TypeError, match=error):
            getattr(reader(), name)(*given)


def test_methods_are_used_without_a_working_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying(Reader):
        def __init__(self, capsule: Any, tensor_type: Any) -> None:
            pass

        def addresses(self, *lists: Any) -> bytes:
            return bytes(len(super().addresses(*lists)))

    extension = native.load()
    for change in (
        lambda patch: patch.setattr(Tensor, "__dlpack_c_exchange_api__", None, raising=False),
        lambda patch: patch.setattr(Tensor, "__dlpack_c_exchange_api__", object(), raising=False),
        lambda patch: patch.setattr(addresses.native, "load", lambda: None),
        lambda patch: extension and patch.setattr(extension, "TensorReader", Lying),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert exchange.__wrapped__() is None


def test_strides_belong_to_the_form_unless_all_are_contiguous() -> None:
    aligned = torch.empty(64)
    aligned = aligned[-aligned.data_ptr() % 64 // 4 :][:32]
    assert lie_of([aligned, aligned.view(4, 8)]) == (bytes([CONTIGUOUS] * 2), None)
    assert lie_of([aligned[1:]]) == (bytes([CONTIGUOUS + 4]), None)
    assert lie_of([aligned, aligned.view(4, 8).t()]) == (bytes([CONTIGUOUS, 0]), ((1,), (1, 8)))
