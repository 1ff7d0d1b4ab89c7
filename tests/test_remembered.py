"""What is remembered of tensors is worked out again as soon as one of them has another form."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import remembered
from bert_fast.remembered import Remembered


@pytest.fixture(params=["by PyTorch", "by hand"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by hand":
        monkeypatch.setattr(remembered, "_has_guards", lambda: False)


class Counted:
    """Remembers the shape and stride of the first tensor, and counts how often it had to look."""

    def __init__(self, **options: Any) -> None:
        self.calls = 0
        self.remembered = Remembered(self._look, **options)

    def _look(self, group: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        self.calls += 1
        first = next(one for one in group if one is not None)
        return first.shape, first.stride(), first.dtype

    def __call__(self, *group: Tensor | None) -> Any:
        return self.remembered(group)


def test_the_same_tensors_are_looked_at_once() -> None:
    of = Counted()
    a, b = nn.Parameter(torch.randn(3, 3)), torch.randn(2)
    first = of(a, None, b)
    with torch.no_grad():
        a.add_(1.0)
        b.zero_()
    assert of(a, None, b) is first and of.calls == 1
    assert of(a, b, None) is not first and of.calls == 2
    assert of(a, None, b) is first and of.calls == 2


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "dtype": lambda p: setattr(p, "data", p.data.half()),
    "shape": lambda p: setattr(p, "data", torch.randn(4, 3)),
    "stride": lambda p: setattr(p, "data", p.data.t()),
    "requires_grad": lambda p: p.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_form_is_looked_at_again(change: Callable[[nn.Parameter], Any]) -> None:
    def form(group: tuple[Tensor | None, ...]) -> Any:
        seen.append(None)
        return None

    seen: list[None] = []
    of = Remembered(form)
    other, p = torch.ones(2), nn.Parameter(torch.randn(3, 3))
    of((other, p))
    change(p)
    of((other, p))
    assert len(seen) == 2


def test_addresses_count_where_they_are_asked_for() -> None:
    plain, by_address = Counted(), Counted(by_address=True)
    p = nn.Parameter(torch.randn(3, 3))
    for of in (plain, by_address):
        of(p)
        of(p)
    kept = p.data
    p.data = kept.clone()
    for of in (plain, by_address):
        of(p)
    assert (plain.calls, by_address.calls) == (1, 2)


def test_what_became_of_an_identity_is_told_apart() -> None:
    """A tensor may get the identity of one that is gone."""
    of = Counted()
    for size in range(1, 200):
        tensor = torch.ones(size)
        assert of(tensor)[0] == (size,)
        del tensor


OTHERS: dict[str, Callable[[], Tensor]] = {
    "negated": lambda: torch._neg_view(torch.randn(3)),
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "sparse": lambda: torch.randn(3).to_sparse(),
    "meta": lambda: torch.randn(3, device="meta"),
    "resized": lambda: torch.randn(3).resize_(2),
    "inference": lambda: _within_inference(),
}


def _within_inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_is_another_form(other: Callable[[], Tensor]) -> None:
    guard = remembered.guard_of([torch.randn(3)])
    assert guard(torch.randn(3)) and not guard(other())


def test_no_tensor_is_kept() -> None:
    of = Counted(by_address=True)
    tensor = torch.ones(3)
    of(tensor)
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None


def test_few_groups_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MAX_KNOWN", 5)
    of = Counted()
    tensors = [torch.ones(3) for _ in range(20)]
    for tensor in tensors:
        of(tensor)
    assert len(of.remembered._known) == 5 and of.calls == 20
    of(tensors[-1])
    assert of.calls == 20


def test_errors_are_not_remembered() -> None:
    def look(group: tuple[Tensor | None, ...]) -> int:
        seen.append(None)
        if len(seen) == 1:
            raise ValueError("once")
        return 1

    seen: list[None] = []
    of, tensor = Remembered(look), torch.ones(1)
    with pytest.raises(ValueError, match="once"):
        of((tensor,))
    assert of((tensor,)) == 1 and of((tensor,)) == 1 and len(seen) == 2
