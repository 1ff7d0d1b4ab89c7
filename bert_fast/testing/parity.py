"""Whole models side by side: random cases, and one way to run any of the models and name everything that comes out.

A case is plain data, so that it can be carried to another process with another version of `transformers`. `evaluate`
works on a Hugging Face model, on the reference and on our models alike: outputs and gradients by name, padding zeroed.
Our models also take the same case packed; what they return is then padded, so that it can be compared.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Every size is small and awkward: odd head counts, a head dimension that is no power of two, odd lengths.
_BASE = {
    "vocab_size": 61,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_DIFFERENTIABLE = ("inputs_embeds", "encoder_hidden_states", "head_mask")
_SCORES = (
    "last_hidden_state", "pooler_output", "logits", "prediction_logits", "seq_relationship_logits", "start_logits",
    "end_logits",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of one model.

    config: what differs from the base configuration. mask: how attention_mask looks, see `_mask`. inputs: which
    optional inputs to make. flags: keyword arguments that are not tensors. first_step: so many columns are run first,
    to fill a cache which the rest then continues.
    """

    name: str
    model: str = "BertModel"
    config: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 3
    length: int = 11
    mask: str = "right"
    inputs: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    first_step: int = 0
    memory_length: int = 7

    @property
    def can_be_packed(self) -> bool:
        """Whether the same call exists without padding: kept tokens first, all in one step."""
        return self.mask in ("none", "full", "right") and not self.first_step

    def full_config(self) -> dict[str, Any]:
        """The configuration's attributes."""
        return {**_BASE, **self.config}

    def valid(self) -> Tensor:
        """bool [B, S]: the tokens that are compared."""
        shape = self.batch_size, self.length
        lengths = torch.tensor([self.length, (self.length + 1) // 2, max(self.length - 2, 1)] * self.batch_size)
        lengths = lengths[: self.batch_size, None]
        columns = torch.arange(self.length).expand(shape)
        if self.mask == "right":
            return columns < lengths
        if self.mask == "left":
            return columns >= self.length - lengths
        if self.mask == "holes":
            return (columns < lengths) & (columns % 3 != 1)
        return torch.ones(shape, dtype=torch.bool)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The call's tensors, from a generator of the case's own."""
        config, shape = self.full_config(), (self.batch_size, self.length)
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def integers(high: int, *size: int) -> Tensor:
            return torch.randint(0, high, size, generator=generator)

        def reals(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        choices = (4,) if self.model == "BertForMultipleChoice" else ()
        tokens = (shape[0], *choices, shape[1])
        made: dict[str, Tensor] = {}
        if "inputs_embeds" in self.inputs:
            made["inputs_embeds"] = reals(*tokens, config.get("embedding_size", config["hidden_size"]))
        else:
            made["input_ids"] = integers(config["vocab_size"], *tokens)
        made |= {
            k: v.unsqueeze(1).expand(tokens).clone() if choices else v for k, v in self._mask(generator, dtype).items()
        }
        if "token_type_ids" in self.inputs:
            made["token_type_ids"] = integers(config["type_vocab_size"], *tokens)
        if "position_ids" in self.inputs:
            made["position_ids"] = integers(config["max_position_embeddings"], *tokens)
        if "head_mask" in self.inputs:
            made["head_mask"] = reals(config["num_attention_heads"])
        if "layer_head_mask" in self.inputs:
            made["head_mask"] = reals(config["num_hidden_layers"], config["num_attention_heads"])
        if "encoder_hidden_states" in self.inputs:
            made["encoder_hidden_states"] = reals(shape[0], self.memory_length, config["hidden_size"])
        if "encoder_attention_mask" in self.inputs:
            columns = torch.arange(self.memory_length)
            made["encoder_attention_mask"] = (columns < 1 + integers(self.memory_length, shape[0], 1)).long()
        num_labels = config.get("num_labels", 2)
        for label in self.labels:
            if label == "words":
                unlabelled = (integers(2, *shape) == 0) | ~self.valid()
                made["labels"] = integers(config["vocab_size"], *shape).masked_fill(unlabelled, -100)
                made["labels"][:, self.length // 2] = torch.where(self.valid()[:, self.length // 2], 5, -100)
            elif label == "next_sentence_label":
                made[label] = integers(2, shape[0])
            elif label in ("start_positions", "end_positions"):
                made[label] = integers(self.length, shape[0])
                made[label][0] = self.length + 3  # outside of the window
            elif label == "tokens":
                made["labels"] = integers(num_labels, *shape).masked_fill(~self.valid(), -100)
            elif label == "class":
                made["labels"] = integers(num_labels if not choices else choices[0], shape[0])
            elif label == "number":
                made["labels"] = reals(shape[0])
            elif label == "classes":
                made["labels"] = integers(2, shape[0], num_labels).to(dtype)
        return made

    def _mask(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """attention_mask: "none"; 2-D "full", "right", "left", "holes"; per pair "3d", "4d" (added to scores)."""
        if self.mask == "none":
            return {}
        if self.mask in ("3d", "4d"):
            size = (self.batch_size, self.length, self.length)
            sees = torch.rand(size, generator=generator) < 0.6
            sees |= torch.eye(self.length, dtype=torch.bool)
            if self.mask == "3d":
                return {"attention_mask": sees.long()}
            slope = -0.1 * (torch.arange(self.length)[:, None] - torch.arange(self.length)).abs()
            return {"attention_mask": added_mask(sees, slope.to(dtype))}
        return {"attention_mask": self.valid().long()}


def added_mask(sees: Tensor, otherwise: Tensor) -> Tensor:
    """bool [B, S, S] as [B, 1, S, S] that is added to scores: `otherwise` where a query sees a key."""
    never = max(torch.finfo(torch.float32).min, torch.finfo(otherwise.dtype).min)
    return torch.where(sees, otherwise, never)[:, None]


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights large enough that attention is far from uniform, LayerNorms and biases that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(centre + 0.25 * noise)


def _named_outputs(output: Any) -> dict[str, Tensor]:
    """Everything in a Hugging Face or reference output, by name."""
    inner = getattr(output, "model", output)  # the reference's heads keep the model's own output apart
    named = {}
    for name in ("loss", *_SCORES):
        value = getattr(output, name, None)
        if value is not None:
            named[name] = value
    for group in ("hidden_states", "attentions", "cross_attentions"):
        for index, value in enumerate(getattr(inner, group, None) or ()):
            named[f"{group}.{index}"] = value
    return named


def _is_by_token(name: str, case: Case) -> bool:
    """Whether an output has a row for every token."""
    if name == "logits":
        return case.model in ("BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification")
    return name.startswith(("last_hidden", "hidden_states", "prediction_logits", "start_", "end_"))


def _without_padding(name: str, value: Tensor, valid: Tensor, case: Case) -> Tensor:
    """Zeros where padding's rows or columns lie, which Hugging Face leaves undefined."""
    if _is_by_token(name, case):
        keep = valid.view(*valid.shape, *[1] * (value.dim() - 2))
    elif "attentions." in name:
        keep = valid[:, None, :, None]
    else:
        return value
    return value.masked_fill(~keep, 0.0)


_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")


def packed_call(case: Case, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The same call for models that take cu_seqlens."""
    is_choice = case.model == "BertForMultipleChoice"
    keep = case.valid().to(next(iter(tensors.values())).device)
    if is_choice:  # every choice is as long as its row
        keep = keep.unsqueeze(1).expand(tensors["input_ids"].shape)
    by_token = _BY_TOKEN + (("labels",) if {"words", "tokens"} & set(case.labels) else ())
    packed: dict[str, Any] = {k: v[keep] if k in by_token else v for k, v in tensors.items()}
    packed.pop("attention_mask", None)
    lengths = keep.flatten(0, -2).sum(1)
    packed["cu_seqlens"] = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed["max_seqlen"] = case.length
    return packed | ({"num_choices": keep.shape[1]} if is_choice else {})


def _padded(value: Tensor, keep: Tensor) -> Tensor:
    """[T, ...] as [B, S, ...], zeros on padding."""
    padded = value.new_zeros(*keep.shape, *value.shape[1:])
    padded[keep] = value
    return padded


def evaluate(model: nn.Module, case: Case, tensors: dict[str, Tensor], packed: bool = False) -> dict[str, Tensor]:
    """Runs a case on the model's device: outputs by name, and "grad <name>" of every parameter and floating input that
    has one, all on the CPU.

    packed: run it without padding, on our models; outputs come back padded.
    What is differentiated is the loss, or where there is none, the scores times fixed random numbers.
    """
    device = next(model.parameters()).device
    tensors = {k: v.to(device, copy=True).requires_grad_(k in _DIFFERENTIABLE) for k, v in tensors.items()}
    valid = case.valid().to(device)
    flags = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in case.flags.items()}
    arguments: dict[str, Any] = {**tensors, **flags}
    if case.first_step:
        output, valid = _in_two_steps(model, case, arguments, valid)
    else:
        output = model(**(packed_call(case, arguments) if packed else arguments))
    named = _named_outputs(output)
    if packed:
        named = {name: _padded(value, valid) if _is_by_token(name, case) else value for name, value in named.items()}
    named = {name: _without_padding(name, value, valid, case) for name, value in named.items()}
    if case.mask == "left":
        named.pop("pooler_output", None)  # Hugging Face pools column 0, which is padding here
    objective = named.get("loss")
    if objective is None:
        objective = torch.zeros((), dtype=torch.float64, device=device)
        for name in _SCORES:
            if name in named:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                upstream = torch.randn(named[name].shape, generator=generator, dtype=torch.float64)
                objective = objective + (named[name] * upstream.to(named[name])).sum()
    objective.backward()
    # a shared parameter under all its names
    leaves = [*model.named_parameters(remove_duplicate=False), *((k, v) for k, v in tensors.items() if v.requires_grad)]
    gradients = {f"grad {name}": leaf.grad for name, leaf in leaves if leaf.grad is not None}
    model.zero_grad(set_to_none=True)
    return {name: value.detach().cpu() for name, value in {**named, **gradients}.items()}


def _in_two_steps(model: nn.Module, case: Case, arguments: dict[str, Any], valid: Tensor) -> tuple[Any, Tensor]:
    """The second step's output and valid tokens."""
    first, second = dict(arguments), dict(arguments)
    for name in ("input_ids", "inputs_embeds", "token_type_ids", "position_ids"):
        if name in arguments:
            first[name] = arguments[name][:, : case.first_step]
            second[name] = arguments[name][:, case.first_step :]
    if "attention_mask" in arguments:
        first["attention_mask"] = arguments["attention_mask"][:, : case.first_step]
    legacy = second.pop("legacy_cache", False)
    first.pop("legacy_cache", None)
    output = model(**first, use_cache=True)
    past = getattr(output, "model", output).past_key_values
    if legacy and hasattr(past, "to_legacy_cache"):
        # 4.57 writes (k, v, None, None) for a layer without a memory and cannot read it back; callers had (k, v).
        past = tuple(tuple(part for part in layer if part is not None) for layer in past.to_legacy_cache())
    second["past_key_values"] = past
    return model(**second, use_cache=True), valid[:, case.first_step :]
