"""`batch_invariant`: whose choice it is, which kernels it leaves, and what is refused."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.batch_invariance import ASKED
from bert_fast.reference.linear import Linear
from bert_fast.torch.linear import linear_fwd

PROCESSORS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
ROWS = (1, 2, 31, 63, 64, 65, 127, 1000, 4096, 20000)


class _Seen(Exception):
    pass


def plans(kind: str, dtype: torch.dtype, width: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels, with all their constants, that make products of each of `ROWS` rows; None where it is the library.

    One of two kernels where a sum is made in parts.
    """
    from bert_fast.triton import _gemm

    prepare = _gemm._prepare
    found: set[Any] = set()

    def note(product: Any) -> None:
        ready = prepare(product)
        found.add((ready.plan, ready.reduce))
        raise _Seen

    monkeypatch.setattr(_gemm, "_prepare", note)
    monkeypatch.setattr(_gemm, "bias_gelu_fwd", lambda a: a.x)  # behind the library's product
    weight = torch.empty(wide, width, dtype=dtype).t()
    for rows in ROWS:
        x = torch.empty(rows, width, dtype=dtype)
        try:
            if kind == "plain":
                _gemm.product(x, weight)
            else:
                _gemm.product_activation(x, weight, None, "gelu", save_pre=True)
        except _Seen:
            continue
        found.add(None)
    monkeypatch.setattr(_gemm, "_prepare", prepare)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_kernel_of_a_product_depends_on_the_weight_alone(
    processor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from bert_fast.triton._launch import assume_architecture

    with assume_architecture(processor):
        for kind in ("plain", "activation"):
            for width, wide in ((768, 3072), (3072, 768), (384, 384), (1024, 3), (100, 60)):
                with bert_fast.batch_invariant():
                    (made,) = plans(kind, dtype, width, wide, monkeypatch)
                plan, reduce = made
                assert plan is not None and reduce is None, "a sum in parts"


def test_without_it_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert len(plans("activation", torch.bfloat16, 768, 3072, monkeypatch)) == 2, "the library, and a kernel"


def test_the_context_is_a_threads_and_a_tasks_own() -> None:
    found: list[bool] = []

    async def task() -> None:
        with bert_fast.batch_invariant():
            await asyncio.sleep(0)
            found.append(ASKED.get())

    async def both() -> None:
        running = asyncio.create_task(task())
        await asyncio.sleep(0)
        found.append(ASKED.get())
        await running

    asyncio.run(both())
    with bert_fast.batch_invariant():
        with bert_fast.batch_invariant():
            pass
        assert ASKED.get()
        thread = threading.Thread(target=lambda: found.append(ASKED.get()))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), bert_fast.batch_invariant():
            raise ZeroDivisionError
        assert ASKED.get()
    assert found == [False, True, False] and not ASKED.get()


def test_on_the_cpu_heads_are_invariant_too() -> None:
    """Hidden states always are; heads of few columns are the library's products outside of the context."""
    torch.manual_seed(0)
    config = bert_fast.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, num_labels=3
    )
    model, ids = bert_fast.BertForSequenceClassification(config).eval(), torch.randint(50, (7, 6))
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            plain, states = model(input_ids=ids).logits, model.bert(input_ids=ids).last_hidden_state
            with bert_fast.batch_invariant():
                asked = model(input_ids=ids).logits
                alone = [model(input_ids=row[None]).logits for row in ids]
                assert torch.equal(model.bert(input_ids=ids).last_hidden_state, states)
        torch.testing.assert_close(asked, plain)
        assert bert_fast.native.load() is None or torch.equal(torch.cat(alone), asked)


class _Elsewhere(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]


def test_what_pytorch_would_compute_on_a_gpu_is_refused() -> None:
    x = torch.zeros(3, 4).as_subclass(_Elsewhere)
    a = Linear(x, torch.zeros(2, 4), None)
    assert linear_fwd(a).shape == (3, 2)
    with bert_fast.batch_invariant(), pytest.raises(bert_fast.BackendError, match=r"^linear: .*'triton'.*'torch'"):
        linear_fwd(a)
