"""Models of BERT's sizes, transformers' and ours with equal weights, and lengths of real texts."""

import json
from typing import Any

import torch

from benchmarks.kit.bert import Size
from benchmarks.kit.record import DATA
from benchmarks.registry import Case


def their_model(kind: str, size: Size, attention: str = "sdpa", **options: Any) -> Any:
    """transformers' model of a kind ("BertModel") with random weights."""
    import transformers

    config = size.config(transformers.BertConfig, attn_implementation=attention, **options)
    return getattr(transformers, kind)(config)


def our_model(theirs: Any) -> torch.nn.Module:
    """The model of ours that has transformers' weights."""
    import bert_fast

    ours = getattr(bert_fast, type(theirs).__name__)(bert_fast.BertConfig.from_hf(theirs.config))
    ours.load_state_dict(theirs.state_dict(), strict=False)
    return ours


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
