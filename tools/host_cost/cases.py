"""The steps that are counted: models of a few layers, ours beside transformers', another length every step."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from tools.null_driver.steps import Step, inputs_of, make_step

__all__ = ["CASES", "FEW", "MANY", "batches", "make"]

FEW, MANY = 2, 4  # layers; what one adds is half the difference
_WARM, _COUNTED = 8, 1  # steps
_SEQUENCES, _SHORTEST, _LONGEST = 8, 30, 60  # of a batch: kernels for texts of up to 64 tokens


class _Lora(nn.Module):
    """A linear layer with the way around it that PEFT's `lora.Linear` takes."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.dropout = base, 2.0, nn.Dropout(0.1)
        weight: Any = base.weight
        self.lora_a = nn.Linear(weight.shape[1], rank, bias=False, dtype=weight.dtype)
        self.lora_b = nn.Linear(rank, weight.shape[0], bias=False, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        own = x.to(self.lora_a.weight.dtype)
        return (result + self.lora_b(self.lora_a(self.dropout(own))) * self.scaling).to(result.dtype)


def _with_adapters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        if hasattr(module, "query") and hasattr(module, "value"):
            module.query, module.value = _Lora(module.query), _Lora(module.value)


def _with_hook(model: nn.Module) -> None:
    first = next(module for module in model.modules() if hasattr(module, "query"))
    first.query.register_forward_hook(lambda *_: None)


def _with_hidden_states(model: nn.Module) -> None:
    model.config.output_hidden_states = True  # type: ignore[union-attr]


# Name -> class, what is done to the model, and which of our models: those in the place of transformers', or our own.
CASES: dict[str, tuple[str, Any, str]] = {
    "classification": ("BertForSequenceClassification", None, "fused"),
    "masked language": ("BertForMaskedLM", None, "fused"),
    "pre-training": ("BertForPreTraining", None, "fused"),
    "embedding": ("BertModel", None, "fused"),
    "own class, pre-training": ("BertForPreTraining", None, "bert_fast"),
    "LoRA on query and value": ("BertForSequenceClassification", _with_adapters, "fused"),
    "a hook on query": ("BertForSequenceClassification", _with_hook, "fused"),
    "hidden states": ("BertForSequenceClassification", _with_hidden_states, "fused"),
}


def make(case: str, precision: str, kind: str, num_layers: int) -> Step:
    """kind: "ours" or "transformers"."""
    name, change, ours = CASES[case]
    step = make_step(name, precision, kind=ours if kind == "ours" else kind, num_layers=num_layers)
    if change is not None:
        change(step.model)
        step.model.train()
        step._gradients = [torch.zeros_like(p) for p in step.model.parameters()]
    return step


def batches(case: str, seed: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Batches before the counting, and those that are counted; no two have as many tokens."""
    rng, seen, found = random.Random(seed), set[int](), []
    while len(found) < _WARM + _COUNTED:
        lengths = tuple(rng.randint(_SHORTEST, _LONGEST) for _ in range(_SEQUENCES))
        if sum(lengths) not in seen:
            seen.add(sum(lengths))
            found.append(inputs_of(CASES[case][0], lengths))
    return found[:_WARM], found[_WARM:]
