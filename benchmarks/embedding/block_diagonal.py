"""Packing by block-diagonal masks, as GLiNER's inference does it, beside `bert_fast.fuse`, on a CPU.

RoBERTa-base's width and 4 of its layers, random weights and words, fp32, inference; 64 texts in four mixes of lengths,
which are those of GLiNER's own benchmark (urchade/GLiNER, pull request 292, with all layers):

    padded          transformers' model, whose attention is PyTorch's SDPA, on the padded batch
    block_diagonal  the same on rows of up to 512 tokens that hold several texts each, the longest first: positions
                    restart, and a mask [rows, 1, S, S] keeps texts apart; rows and mask are made beforehand
    fused           the model after `bert_fast.fuse`, on the padded batch

They take turns, by CPU time of the process on one thread. Hidden states of all tokens must agree, or there is no
result.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.kit.bert import BASE
from benchmarks.kit.clock import interleaved
from benchmarks.models.build import their_model
from benchmarks.models.families import FAMILIES
from bert_fast import fuse

TEXTS, LAYERS, ROW = 64, 4, 512
MIXES: dict[str, Callable[[], np.ndarray]] = {
    "short_zipf": lambda: np.random.default_rng(2024).zipf(1.2, TEXTS).clip(8, 128),
    "short_uniform": lambda: np.random.default_rng(1337).integers(8, 65, TEXTS),
    "mixed_tail": lambda: np.append(256, np.random.default_rng(314).integers(8, 49, TEXTS - 1)),
    "flat_long": lambda: np.full(TEXTS, 256),
}
_AGREE = 2e-5  # of hidden states, which are up to about 4: fp32 sums in other orders, layer after layer
_FAMILY = FAMILIES["Roberta"]


def name_of(mix: str) -> str:
    """The case's name in results."""
    return f"gliner/roberta base, {LAYERS} layers/{mix}"


def rows_of(lengths: list[int]) -> list[list[int]]:
    """Which texts stand in each row: the longest first, each in the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        row = next((row for row, left in enumerate(room) if left >= lengths[text]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(ROW)
        rows[row].append(text)
        room[row] -= lengths[text]
    return rows


def laid_out(texts: list[Tensor], rows: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs of rows with their block-diagonal mask, the text [rows, S] of each place, -1 for padding)."""
    width = max(sum(len(texts[text]) for text in row) for row in rows)
    ids = torch.full((len(rows), width), _FAMILY.pad_token_id)
    positions, owner = ids.clone(), torch.full_like(ids, -1)
    for row, members in enumerate(rows):
        at = 0
        for text in members:
            place = slice(at, at := at + len(texts[text]))
            ids[row, place], owner[row, place] = texts[text], text
            positions[row, place] = _FAMILY.pad_token_id + 1 + torch.arange(len(texts[text]))
    mask = (owner[:, None, :, None] == owner[:, None, None, :]) if len(rows) < len(texts) else (owner >= 0).long()
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}, owner


def run_mix(mix: str, rounds: int) -> dict[str, Any]:
    """Times one mix. RuntimeError where hidden states differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        theirs = their_model("RobertaModel", BASE, num_hidden_layers=LAYERS).eval()
        lengths = [int(length) for length in MIXES[mix]()]
        texts = [torch.randint(5, _FAMILY.vocab_size, (length,)) for length in lengths]
        padded, by_text = laid_out(texts, [[text] for text in range(TEXTS)])
        packed, by_row = laid_out(texts, rows_of(lengths))
        models = {"padded": (theirs, padded), "block_diagonal": (theirs, packed)}
        models["fused"] = fuse(copy.deepcopy(theirs)), {name: padded[name] for name in ("input_ids", "attention_mask")}

        def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            with torch.inference_mode():
                return model(**inputs).last_hidden_state

        runs: dict[str, Callable[[], Tensor]] = {name: lambda of=of: run(*of) for name, of in models.items()}
        right = runs["padded"]()[by_text >= 0]
        found = {"fused": runs["fused"]()[by_text >= 0]}
        order = by_row[by_row >= 0].argsort(stable=True)
        found["block_diagonal"] = runs["block_diagonal"]()[by_row >= 0][order]
        for name, states in found.items():
            if not (off := float((states - right).abs().max())) <= _AGREE:
                raise RuntimeError(f"{name_of(mix)}: {name}: hidden states differ by {off:.1e}: nothing to time")
        times = interleaved(runs, rounds, warmup=0, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    best = min(("padded", "block_diagonal"), key=lambda name: times[name].median)
    return {
        "case": name_of(mix),
        "threads": 1,
        "texts": TEXTS,
        "real_tokens": sum(lengths),
        "fill": round(sum(lengths) / by_text.numel(), 4),
        "fill_of_rows": round(sum(lengths) / by_row.numel(), 4),
        **{f"{name}_cpu_s": round(taken.median, 4) for name, taken in times.items()},
        "block_diagonal_over_padded": round(times["block_diagonal"].speedup_over(times["padded"]), 3),
        "fused_over_padded": round(times["fused"].speedup_over(times["padded"]), 3),
        "ratio": round(times["fused"].speedup_over(times[best]), 3),
        **{f"{name}_all_cpu_s": [round(s, 4) for s in taken.seconds] for name, taken in times.items()},
    }
