"""Requests for back-ends: whose they are, and that none outlives its context."""

import asyncio
import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bert_fast import ops, use_backend
from bert_fast.backend import AUTO, requested
from bert_fast.errors import BackendError
from bert_fast.reference import linear


def test_the_innermost_context_counts_and_an_argument_before_it() -> None:
    with use_backend("reference"):
        with use_backend("torch"):
            assert requested() == "torch" and requested("reference") == "reference"
        assert requested() == "reference"
    assert requested() == AUTO


@pytest.mark.parametrize("first", [0, 1, 2], ids="first {}".format)
def test_contexts_may_close_in_any_order(first: int) -> None:
    """As generators and exit stacks do; none leaves its request behind."""
    names = ["reference", "torch", "reference"]
    contexts = [use_backend(name) for name in names]
    for context in contexts:
        context.__enter__()
    for closed in (first, (first + 1) % 3, (first + 2) % 3):
        contexts[closed].__exit__(None, None, None)
        names[closed] = ""
        assert requested() == next((name for name in reversed(names) if name), AUTO)


def test_a_failure_within_ends_the_request() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    with (
        pytest.raises(BackendError, match="backend: expected one of triton, torch, reference, got 'cuda'"),
        use_backend("cuda"),
    ):
        pass
    assert requested() == AUTO


def test_tasks_do_not_see_one_another() -> None:
    """Two tasks whose contexts overlap, the first to open being the first to close."""

    async def task(name: str, delays: tuple[int, int]) -> list[str]:
        seen = []
        with use_backend(name):
            for delay in delays:
                for _ in range(delay):
                    await asyncio.sleep(0)
                seen.append(requested())
        await asyncio.sleep(0)
        return [*seen, requested()]

    async def main() -> list[list[str]]:
        return await asyncio.gather(task("reference", (1, 1)), task("torch", (1, 4)))

    assert asyncio.run(main()) == [["reference", "reference", AUTO], ["torch", "torch", AUTO]]
    assert requested() == AUTO


def test_a_task_begins_with_what_was_open_where_it_was_made() -> None:
    async def child(is_closed: asyncio.Event) -> str:
        await is_closed.wait()
        return requested()

    async def main() -> tuple[str, str, str]:
        is_closed = asyncio.Event()
        with use_backend("reference"):
            task = asyncio.create_task(child(is_closed))
            in_thread = await asyncio.to_thread(requested)
        is_closed.set()
        return await task, in_thread, requested()

    assert asyncio.run(main()) == ("reference", "reference", AUTO)


def test_threads_begin_with_nothing() -> None:
    with ThreadPoolExecutor(1) as pool, use_backend("reference"):
        assert pool.submit(requested).result() == AUTO


def test_a_context_that_is_closed_elsewhere_leaves_nothing() -> None:
    """A generator that one context starts and another ends."""

    def steps() -> Iterator[str]:
        with use_backend("reference"):
            yield requested()

    generator = steps()
    assert contextvars.copy_context().run(next, generator) == "reference"
    generator.close()
    assert requested() == AUTO


@pytest.fixture
def reference_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call of the reference's linear layer."""
    calls: list[int] = []
    function = linear.linear_fwd
    monkeypatch.setattr(linear, "linear_fwd", lambda *arguments: calls.append(1) or function(*arguments))
    return calls


@pytest.mark.parametrize("where", ["within", "around"])
def test_compiled_functions_keep_to_a_request(reference_calls: list[int], where: str) -> None:
    def within(x: torch.Tensor) -> torch.Tensor:
        with use_backend("reference"):
            return ops.linear(x, x)

    def around(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, x)

    torch._dynamo.reset()
    x = torch.randn(3, 3)
    compiled = torch.compile({"within": within, "around": around}[where], fullgraph=True, backend="eager")
    with use_backend("reference" if where == "around" else "torch"):
        y = compiled(x)
        assert requested() == ("reference" if where == "around" else "torch")
    assert len(reference_calls) == 1 and torch.equal(y, ops.linear(x, x, backend="reference"))
    assert requested() == AUTO
