"""Models of BERT's sizes, transformers' and ours with equal weights, and lengths of real texts."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.kit.bert import Size
from benchmarks.kit.results import DATA
from benchmarks.models.families import family_of
from benchmarks.registry import Case


def their_model(kind: str, size: Size, attention: str = "sdpa", **options: Any) -> Any:
    """transformers' model of a kind ("BertModel", "RobertaForMaskedLM") with random weights.

    attention: where the family has no SDPA, its own takes that place. options: of the configuration, by BERT's names.
    """
    import transformers

    cls, family = getattr(transformers, kind), family_of(kind)
    given = {"vocab_size": family.vocab_size, "attn_implementation": attention, **options}
    if attention == "sdpa":
        given["attn_implementation"] = family.attention
    return cls(size.config(lambda **values: family.configuration(cls.config_class, values), **given))


def our_model(theirs: Any) -> nn.Module:
    """The model of ours that has transformers' weights: copies, on the same device."""
    import bert_fast

    config = bert_fast.BertConfig.from_hf(theirs.config)
    return with_weights_of(theirs, lambda: getattr(bert_fast, type(theirs).__name__)(config))


def with_weights_of(donor: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, with copies of the donor's parameters and buffers of the same names, on the donor's device.

    It is built on the meta device, so that no weight is drawn a second time. What is one tensor in the donor is one in
    the copy. KeyError where the donor lacks a name.
    """
    with torch.device("meta"):
        model = build()
    given: dict[str, torch.Tensor] = dict(donor.named_parameters(remove_duplicate=False))
    given |= dict(donor.named_buffers(remove_duplicate=False))
    copies: dict[int, Any] = {}
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name in [name for name, tensor in tensors.items() if tensor is not None]:
                source = given[f"{path}.{name}" if path else name]
                if id(source) not in copies:
                    copy = source.detach().clone()
                    is_parameter = isinstance(source, nn.Parameter)
                    copies[id(source)] = nn.Parameter(copy, source.requires_grad) if is_parameter else copy
                tensors[name] = copies[id(source)]
    return model


def draw_lengths(case: Case, num_batches: int) -> list[list[int]]:
    """Lengths of the sequences of every batch. FileNotFoundError where those of the texts are not there."""
    size = case.batch_size
    if case.lengths == "full":
        return [[case.max_len] * size] * num_batches
    sample = json.loads((DATA / "length_distributions" / f"{case.lengths}.json").read_text())["sample_lengths"]
    lengths = [min(length, case.max_len) for length in sample]
    if case.order == "sorted":  # windows of 50 batches, as a bucketing sampler does; batches spread over the window
        window = sorted(lengths[: 50 * size])
        step = -(-len(window) // size) // num_batches
        return [window[i * size : (i + 1) * size] for i in range(step // 2, step // 2 + step * num_batches, step)]
    return [lengths[i * size : (i + 1) * size] for i in range(num_batches)]
