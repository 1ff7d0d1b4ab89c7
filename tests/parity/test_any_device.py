"""Whole models on a device: heads, dropout, `fuse`, training. A GPU runs these first, at BERT's widths.

Where there is none, a third of the widths takes the CPU the same way: sums of up to 768 terms, and of more in parts.
"""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast import optim
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate, randomize

from .comparing import check, in_fp64, our_model

transformers = pytest.importorskip("transformers", minversion="5")

on_any_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")

HEADS_OF_64 = 12 if torch.cuda.is_available() else 4
BASE = {
    "hidden_size": 64 * HEADS_OF_64, "num_attention_heads": HEADS_OF_64, "intermediate_size": 256 * HEADS_OF_64,
    "max_position_embeddings": 512,
}  # fmt: skip
SEED = {"dropout_seed": torch.tensor([2**40 + 17])}
HEADS = [
    Case("BertForMaskedLM", labels=("words",)),
    Case("BertForSequenceClassification", labels=("class",)),
    Case("BertForTokenClassification", labels=("tokens",)),
    Case("BertForQuestionAnswering", mask="none", labels=("start_positions", "end_positions")),
    Case("BertForPreTraining", labels=("words", "next_sentence_label")),
    Case("BertForMultipleChoice", labels=("class",)),
]  # fmt: skip
HEADS = [
    replace(case, model=case.name, inputs=("token_type_ids",), config=BASE, length=length)
    for case, length in zip(HEADS, (77, 40, 131, 64, 33, 20), strict=True)
]


def weights_like_berts(model: nn.Module) -> None:
    """Attention is far from uniform, norms and biases do something, sums over 768 stay near 1."""
    randomize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.2)


class Trained(NamedTuple):
    """A case and its weights, and what a model to compare with makes of them: in fp32, and in fp64."""

    case: Case
    weights: dict[str, Tensor]
    plain: dict[str, Tensor]
    truth: dict[str, Tensor]


@pytest.fixture(scope="module", params=HEADS, ids=lambda case: case.name)
def by_reference(request: pytest.FixtureRequest) -> Trained:
    """Once for all forms and devices: the reference's passes are most of the time."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    case = replace(request.param, config=request.param.config | rates, flags=SEED)
    reference = our_model(case, "reference").train()
    weights_like_berts(reference)
    weights = {name: t.clone() for name, t in reference.state_dict().items()}
    tensors = case.tensors(torch.float32)
    plain = evaluate(reference, case, tensors)
    return Trained(case, weights, plain, evaluate(reference.double(), case, in_fp64(tensors)))


@on_any_device
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_training_with_dropout_is_the_references_on_a_cpu(by_reference: Trained, form: str, device: str) -> None:
    """Every output and gradient, so every mask of every layer: one other bit would show far above rounding."""
    case, weights, plain, truth = by_reference
    fast = our_model(case, "padded")
    fast.load_state_dict(weights)
    logits = {"output_logits": True} if "words" in case.labels else {}
    with_logits = replace(case, flags=case.flags | logits)
    check(with_logits, form, torch.float32, fast.to(device).train(), plain, truth)


@pytest.fixture(scope="module", params=HEADS[:4], ids=lambda case: case.name)
def by_transformers(request: pytest.FixtureRequest, device: str) -> Trained:
    """The same of transformers' model in evaluation, in bf16 for fp32: once for both forms."""
    case = request.param
    config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
    model: Any = getattr(transformers, case.model)(config).eval()
    weights_like_berts(model)
    weights = {name: t.clone() for name, t in model.to(torch.bfloat16).state_dict().items()}
    tensors = case.tensors(torch.bfloat16)
    plain = evaluate(model.to(device), case, tensors)
    return Trained(case, weights, plain, evaluate(model.double(), case, in_fp64(tensors)))


@on_any_device
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_bfloat16_beside_transformers(by_transformers: Trained, form: str, device: str) -> None:
    case, weights, plain, truth = by_transformers
    ours = our_model(case, form)
    ours.load_state_dict(weights)
    check(case, form, torch.bfloat16, ours.to(device), plain, truth)


def classifier() -> nn.Module:
    """transformers', two layers of BERT-base."""
    sizes = HEADS[1].full_config()
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=3))
    weights_like_berts(model)
    return model


def gradients(model: nn.Module, call: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Loss and gradients by name; dtype: of autocast, if any."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(call["input_ids"].device.type, dtype, enabled=dtype is not None):
        loss = model(**call).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@on_any_device
def test_a_fused_model_has_the_gradients_of_the_model(device: str) -> None:
    """Under autocast to bf16, and in fp32."""
    model = classifier().eval().to(device)
    call = {
        name: t.to(device) for name, t in replace(HEADS[1], batch_size=4, mask="right").tensors(torch.float32).items()
    }
    truth = gradients(copy.deepcopy(model).double(), call)
    floor = 1e-3 * max(float(t.abs().max()) for t in truth.values())  # a key's bias has no gradient but rounding's
    for dtype in (torch.bfloat16, None):
        plain = gradients(model, call, dtype)
        fused = gradients(bert_fast.fuse(model), call, dtype)
        bert_fast.unfuse(model)
        assert fused.keys() == truth.keys()
        for name, exact in truth.items():
            scale = max(float(exact.abs().max()), floor)
            mine, theirs = ((found[name].double() / scale).to(dtype or torch.float32) for found in (fused, plain))
            assert_close_to_truth("fast_model", "gradient", mine, theirs, exact / scale, name=name)


@on_any_device
def test_a_fused_model_trains_and_repeats_itself(device: str) -> None:
    """Dropout on, autocast, our AdamW: bit for bit the same twice from one seed, and the loss falls."""
    losses: list[list[float]] = []
    call = {name: t.to(device) for name, t in HEADS[1].tensors(torch.float32).items()}
    start = classifier().to(device).train()
    for _ in range(2):
        torch.manual_seed(5)
        model = bert_fast.fuse(copy.deepcopy(start))
        optimizer = optim.AdamW(model.parameters(), lr=2e-4)
        losses.append([])
        for _ in range(8):
            losses[-1].append(float(gradients(model, call, torch.bfloat16)["loss"]))
            optimizer.step()
    assert losses[0] == losses[1]
    assert min(losses[0][-3:]) < 0.5 * losses[0][0]
