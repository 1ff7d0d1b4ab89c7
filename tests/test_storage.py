"""Parameters as neighbours in memory: what joins them, what is left alone, what a copy is made of."""

import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bert_fast.storage import are_neighbours, join_memory, one_tensor, separate_memory


def three(rows: tuple[int, int, int] = (8, 8, 8), columns: tuple[int, ...] = (4,), **options) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(n, *columns, **options)) for n in rows]


@pytest.mark.parametrize("rows", [(8, 8, 8), (4, 8, 1)])
@pytest.mark.parametrize("columns", [(4,), (), (2, 6), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joining_keeps_objects_values_and_gradients(rows, columns, dtype):
    parameters = three(rows, columns, dtype=dtype)
    parameters[1].requires_grad_(False)
    parameters[2].grad = torch.ones_like(parameters[2])
    values, gradient, old = [p.detach().clone() for p in parameters], parameters[2].grad, parameters[0].data_ptr()
    join_memory(*parameters)
    assert are_neighbours(*parameters) and parameters[0].data_ptr() != old
    assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    assert [p.requires_grad for p in parameters] == [True, False, True] and all(p.is_leaf for p in parameters)
    assert parameters[2].grad is gradient
    with torch.no_grad():
        whole = one_tensor(*parameters)
    assert whole.data_ptr() == parameters[0].data_ptr() and torch.equal(whole, torch.cat(values))
    assert whole.is_contiguous()


def test_joined_in_inference_mode_they_can_be_trained_after_it():
    parameters = three()
    with torch.inference_mode():
        join_memory(*parameters)
        assert are_neighbours(*parameters)
    sum(p.square().sum() for p in parameters).backward()
    assert all(torch.equal(p.grad, 2 * p) for p in parameters)
    with torch.inference_mode():
        of_inference = three()
        join_memory(*of_inference)
        assert are_neighbours(*of_inference)


def test_joining_again_moves_nothing():
    parameters = three()
    join_memory(*parameters)
    places = [p.data_ptr() for p in parameters]
    join_memory(*parameters)
    assert places == [p.data_ptr() for p in parameters]


def test_the_old_memory_is_freed():
    parameters = three()
    old = [weakref.ref(p.untyped_storage()) for p in parameters]
    join_memory(*parameters)
    gc.collect()
    assert not any(ref() for ref in old)


def test_each_has_a_storage_of_its_own():
    parameters = three((8, 4, 8))
    values = [p.detach().clone() for p in parameters]
    join_memory(*parameters)
    assert [p.untyped_storage().nbytes() for p in parameters] == [128, 64, 128]
    assert all(p.untyped_storage().data_ptr() == p.data_ptr() and p.storage_offset() == 0 for p in parameters)
    for p, value in zip(parameters, values, strict=True):
        buffer = io.BytesIO()
        torch.save(p, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), value) and len(buffer.getvalue()) < 2000


def test_a_piece_keeps_the_memory_and_the_last_one_frees_it():
    a, b, c = three()
    join_memory(a, b, c)
    block = weakref.ref(one_tensor(a.detach(), b.detach(), c.detach()))
    expected = b.detach().clone()
    del a, c
    gc.collect()
    assert torch.equal(b, expected) and block() is not None
    del b
    gc.collect()
    assert block() is None


def test_separated_they_are_ordinary_again():
    parameters = three()
    values, alone = [p.detach().clone() for p in parameters], nn.Parameter(torch.randn(3))
    place = alone.data_ptr()
    join_memory(*parameters)
    separate_memory(*parameters, alone, None)
    assert not are_neighbours(*parameters) and alone.data_ptr() == place
    for p, value in zip(parameters, values, strict=True):
        assert torch.equal(p, value) and p.untyped_storage().resizable() and not vars(p.untyped_storage())
    join_memory(*parameters)
    assert are_neighbours(*parameters)


def test_a_storage_that_was_given_other_memory_is_no_piece():
    parameters = three()
    values = [p.detach().clone() for p in parameters]
    join_memory(*parameters)
    for p in parameters:
        p.share_memory_()
    places = [p.data_ptr() for p in parameters]
    assert not are_neighbours(*parameters)
    join_memory(*parameters)
    separate_memory(*parameters)
    assert places == [p.data_ptr() for p in parameters], "shared memory is never moved"
    with torch.no_grad():
        assert torch.equal(one_tensor(*parameters), torch.cat(values))


def test_some_of_a_block():
    a, b, c = three((4, 8, 12))
    join_memory(a, b, c)
    with torch.no_grad():
        for some in ((a, b), (b, c), (b,), (c,)):
            assert one_tensor(*some).data_ptr() == some[0].data_ptr()
            assert torch.equal(one_tensor(*some), torch.cat(some))
        halves = a[:2], a[2:]  # within a piece
        assert torch.equal(one_tensor(*halves), a)
        other_type = [p.view(torch.int32) for p in (a, b, c)]
        assert torch.equal(one_tensor(*other_type), torch.cat(other_type))
        flat = [p.view(-1) for p in (a, b, c)]
        assert torch.equal(one_tensor(*flat), torch.cat(flat))


def test_writing_to_one_shows_in_the_whole():
    parameters = three()
    join_memory(*parameters)
    with torch.no_grad():
        parameters[1].fill_(7.0)
        assert (one_tensor(*parameters)[8:16] == 7.0).all()


def test_tied_parameters_are_left_alone():
    a, b, _ = three()
    overlapping = nn.Parameter(torch.empty(0))
    overlapping.data = a.data
    for parameters in ((a, b, a), (a, b, overlapping), (a, b, nn.Parameter(a.data[4:]))):
        places = [p.data_ptr() for p in parameters]
        join_memory(*parameters)
        assert places == [p.data_ptr() for p in parameters]


class Special(nn.Parameter):
    """As quantised parameters are: a subclass whose data means something else."""


@pytest.mark.parametrize(
    "parameters",
    [
        [None, *three()[:2]],
        [*three(dtype=torch.float64)[:2], three()[0]],
        [*three()[:2], three(columns=(5,))[0]],
        three(device="meta"),
        [*three()[:2], nn.Parameter(torch.randn(4, 8).t())],
        three((3, 3, 3), (5,)),  # 60 bytes
        three((4, 4, 4), (), dtype=torch.float16),  # 8 bytes
        [*three()[:2], Special(torch.randn(8, 4))],
        [*three()[:2], torch.randn(8, 4)],
        [nn.Parameter(torch.tensor(1.0)) for _ in range(3)],
        three((8, 0, 8)),
    ],
    ids=[
        "none",
        "dtypes",
        "shapes",
        "meta",
        "transposed",
        "60 bytes",
        "8 bytes",
        "subclass",
        "tensor",
        "scalars",
        "empty",
    ],
)
def test_what_cannot_be_joined_stays_as_it_is(parameters):
    before = [None if p is None or p.is_meta else (p.data_ptr(), p.stride()) for p in parameters]
    join_memory(*parameters)
    assert before == [None if p is None or p.is_meta else (p.data_ptr(), p.stride()) for p in parameters]


def test_memory_shared_with_other_processes_stays_theirs():
    parameters = three()
    for p in parameters:
        p.share_memory_()
    places = [p.data_ptr() for p in parameters]
    join_memory(*parameters)
    assert places == [p.data_ptr() for p in parameters]


def test_strangers_are_copied():
    parameters = three()
    assert not are_neighbours(*parameters)
    with torch.no_grad():
        assert torch.equal(one_tensor(*parameters), torch.cat(parameters))
    join_memory(*parameters)
    a, b, c = parameters
    for others in ((a, c, b), (b, a, c), (a, b, c.detach().clone()), (a, c)):
        assert not are_neighbours(*others)
        assert torch.equal(one_tensor(*others), torch.cat(others))
    assert are_neighbours(a, b) and are_neighbours(b, c)


def test_a_gradient_is_recorded():
    parameters = three()
    join_memory(*parameters)
    upstream = torch.randn(24, 4)
    one_tensor(*parameters).backward(upstream)
    assert torch.equal(torch.cat([p.grad for p in parameters]), upstream)


def test_tracing_and_transforms_get_a_copy():
    parameters = three()
    join_memory(*parameters)
    values = [p.detach() for p in parameters]
    assert "cat" in make_fx(one_tensor, tracing_mode="fake")(*values).code
    gradient = torch.func.grad(lambda *t: one_tensor(*t).square().sum())(*values)
    torch.testing.assert_close(gradient, 2 * values[0])
    batched = torch.stack([torch.cat(values)] * 2).view(2, 3, 8, 4).unbind(1)
    assert torch.func.vmap(one_tensor)(*batched).shape == (2, 24, 4)
    torch._dynamo.reset()
    compiled = torch.compile(one_tensor, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*parameters), torch.cat(parameters))
    with FakeTensorMode():
        fake = three()
        join_memory(*fake)
        assert one_tensor(*fake).shape == (24, 4)
