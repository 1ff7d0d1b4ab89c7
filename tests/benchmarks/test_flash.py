"""transformers' models on flattened inputs give what they give on padded ones; PyTorch's kernel as it is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the package transformers is not installed")

from benchmarks.models import finetuning_steps, flash, step_cases, training_steps
from benchmarks.models.build import with_weights_of
from benchmarks.models.step_cases import StepCase
from bert_fast.testing.tolerances import RELATIVE
from tests.benchmarks.conftest import per_text

CPU = torch.device("cpu")
PRETRAINING, FINETUNING = step_cases.SMALL_CASES[0], finetuning_steps.SMALL_CASES[0]


def both(case: StepCase) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """(padded model, model for flattened inputs, padded inputs, flattened inputs); fp64, equal weights far from 0."""
    module: Any = finetuning_steps if case is FINETUNING else training_steps
    donor, batch = finetuning_steps.draw_donor(case, CPU).double(), module.make_batch(case, CPU)
    flash.register()
    model = with_weights_of(donor, lambda: training_steps.their_step_model(case, flash.ATTENTION))
    return donor, model, batch.padded, batch.flattened


def loss_of(case: StepCase) -> Callable[[Any, dict[str, Any]], Tensor]:
    if case is PRETRAINING:
        return flash.pretraining_loss
    return lambda model, inputs: torch.nn.functional.cross_entropy(flash.classified(model, inputs), inputs["labels"])


@pytest.mark.parametrize("case", [PRETRAINING, FINETUNING], ids=["pretraining", "finetuning"])
@pytest.mark.usefixtures("flash_on_cpu")
def test_loss_and_gradients_are_those_of_padded_inputs(case: StepCase) -> None:
    padded, flat, batch, inputs = both(case)
    expected, found = padded.eval()(**batch).loss, loss_of(case)(flat.eval(), inputs)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=RELATIVE["vs_transformers_fp64"])
    for loss in (expected, found):
        loss.backward()
    largest = max(float(p.grad.abs().max()) for p in padded.parameters() if p.grad is not None)
    theirs = dict(padded.named_parameters())
    for name, p in flat.named_parameters():
        if theirs[name].grad is None:
            assert p.grad is None, name
        else:
            assert (p.grad - theirs[name].grad).abs().max() <= RELATIVE["vs_transformers_fp64"] * largest, name


def test_attention_is_told_dropout_scale_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any) -> Tensor:
        given.append((tuple(q.shape), cu_seqlens.tolist(), *rest))
        return per_text(q, k, v, cu_seqlens, *rest)

    monkeypatch.setattr(flash, "flash_varlen", noted)
    _, model, batch, inputs = both(FINETUNING)
    lengths = batch["attention_mask"].sum(1)
    offsets = [0, *lengths.cumsum(0).tolist()]
    heads, head_dim = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    for p in (0.1, 0.0):
        flash.classified(model.train(p > 0), inputs)
        expected = ((offsets[-1], heads, head_dim), offsets, int(lengths.max()), p, head_dim**-0.5)
        assert given == [expected] * model.config.num_hidden_layers
        given.clear()
    assert inputs["position_ids"][0].tolist() == [i for length in lengths.tolist() for i in range(length)]


def test_pytorchs_kernel_takes_the_call_and_has_a_gradient() -> None:
    """Shapes alone, which needs no GPU."""
    q, k, v = (torch.empty(10, 2, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu_seqlens = torch.empty(3, device="meta", dtype=torch.int32)
    out = flash.flash_varlen(q, k, v, cu_seqlens, 6, 0.1, 0.25)
    out.backward(torch.empty_like(out))
    assert out.shape == q.shape and all(t.grad is not None and t.grad.shape == t.shape for t in (q, k, v))
