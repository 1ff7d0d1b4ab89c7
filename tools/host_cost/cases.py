"""The steps that are counted, of bert_fast's fused models and of transformers' with SDPA, and their batches."""

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tools.null_driver.steps import SIZES, Step, _model, _ours, _torchs, inputs_of

CONTESTANTS = ("fused", "transformers")
PRECISIONS = ("bf16", "autocast")
LAYERS = (2, 6)
NUM_TEXTS, SHORTEST, LONGEST = 8, 30, 60


class Case(NamedTuple):
    """name: a line of the table. of: the class in transformers. adapted: changes the model after it was fused."""

    name: str
    of: str
    adapted: Callable[[Any], Any] = lambda model: model
    options: tuple[tuple[str, Any], ...] = ()


class _Embedding(nn.Module):
    """Mean pooling over the words of each text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> tuple[Tensor]:
        hidden = self.model(attention_mask=attention_mask, **inputs)[0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9),)


def _lora(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.0))


def _hooked(model: Any) -> Any:
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda module, given, made: None)
    return model


CLASSIFICATION = "BertForSequenceClassification"
CASES = (
    Case("layer", "BertModel"),
    Case("sequence classification", CLASSIFICATION),
    Case("masked language model", "BertForMaskedLM"),
    Case("pre-training", "BertForPreTraining"),
    Case("embedding, mean pooling", "BertModel", _Embedding),
    Case("LoRA on query and value", CLASSIFICATION, _lora),
    Case("a hook on one query", CLASSIFICATION, _hooked),
    Case("output_hidden_states", CLASSIFICATION, options=(("output_hidden_states", True),)),
)


def batches(case: Case, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns padded batches, each of other lengths."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [tuple(rng.randint(SHORTEST, LONGEST) for _ in range(NUM_TEXTS)) for _ in range(count)]
    return [{**inputs_of(case.of, one), **dict(case.options)} for one in lengths]


def make(case: Case, precision: str, contestant: str, num_layers: int) -> Step:
    """Returns a step of a new model with random weights, in training mode."""
    torch.manual_seed(0)
    sizes = SIZES | dict(num_hidden_layers=num_layers, num_labels=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.adapted(_model(case.of, contestant, sizes))
    return Step(model.train(), {}, precision, _torchs if contestant == "transformers" else _ours)
