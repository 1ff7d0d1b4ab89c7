"""Whole models: ours, or Hugging Face's after `fuse`, against Hugging Face's as it is.

The same weights, lengths and gradients on both sides.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kit import bert
from benchmarks.kit.clock import interleaved
from benchmarks.models.build import draw_lengths, our_model, their_model
from benchmarks.models.families import FAMILIES
from benchmarks.registry import Case
from bert_fast import fuse


def make_models(
    shape: str,
    dropout_p: float,
    num_layers: int | None = None,
    is_fused: bool = False,
    device: torch.device | str = "cpu",
    family: str = "Bert",
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(bert_fast's or a fused one, Hugging Face's) models of one shape; equal weights, drawn on the device."""
    options: dict[str, object] = {} if num_layers is None else {"num_hidden_layers": num_layers}
    options |= dict(hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p)
    with torch.device(device):
        theirs = their_model(f"{family}Model", bert.BY_NAME[shape], **options)
    return fuse(copy.deepcopy(theirs)) if is_fused else our_model(theirs), theirs


def padded_batch(lengths: list[int], family: str = "Bert") -> dict[str, Tensor]:
    """Random ids, padded to the longest sequence, with their mask."""
    vocab_size, padding = FAMILIES[family].vocab_size, FAMILIES[family].pad_token_id
    longest = max(lengths)
    keep_mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    input_ids = torch.randint(1000, vocab_size, keep_mask.shape).masked_fill(~keep_mask, padding)
    return {"input_ids": input_ids, "attention_mask": keep_mask.long()}


def make_step(model: torch.nn.Module, batch: dict[str, Tensor], gradient: Tensor | None) -> Callable[[], None]:
    """One inference, or one forward and backward where a gradient is given."""

    def inference() -> None:
        with torch.inference_mode():
            model(**batch)

    def training() -> None:
        model(**batch).last_hidden_state.backward(gradient)
        model.zero_grad(set_to_none=True)

    return inference if gradient is None else training


def run_case(case: Case, rounds: int, num_batches: int, gemm: str = "default") -> dict[str, object]:
    """Times one case on the CPU, in fp32; returns real tokens/s of both sides, fill, ratio, and the ratio aimed at."""
    if gemm == "mkl":  # what a processor gets where MKL itself uses all instructions: no help from oneDNN
        from bert_fast.torch import _gemm

        _gemm._mkl_lacks_avx512 = lambda: False
    torch.manual_seed(0)
    is_training = case.mode == "training"
    dropout_p = 0.1 if is_training else 0.0
    pair = make_models(case.shape, dropout_p, is_fused=case.is_fused, family=case.family)
    models = dict(zip(("bert_fast", "transformers"), pair, strict=True))
    batches = [padded_batch(lengths, case.family) for lengths in draw_lengths(case, num_batches)]
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    hidden = bert.BY_NAME[case.shape].hidden
    gradients = [
        torch.randn(*batch["input_ids"].shape, hidden) * batch["attention_mask"][:, :, None] if is_training else None
        for batch in batches
    ]
    contestants: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        model.train(is_training)
        steps = [make_step(model, batch, gradient) for batch, gradient in zip(batches, gradients, strict=True)]
        contestants[name] = lambda steps=steps: [step() for step in steps]
    times = interleaved(contestants, rounds)
    fill = real / padded
    return {
        "case": case.name + ("" if gemm == "default" else f", {gemm}"),
        "fill": round(fill, 4),
        "real_tokens": real,
        "bert_fast_tokens_per_s": round(real / times["bert_fast"].median, 1),
        "transformers_tokens_per_s": round(real / times["transformers"].median, 1),
        "ratio": round(times["bert_fast"].speedup_over(times["transformers"]), 3),
        "goal": round(max(0.9 / fill, 0.98 if case.is_fused else 1.0), 3),
        "bert_fast_s": [round(s, 4) for s in times["bert_fast"].seconds],
        "transformers_s": [round(s, 4) for s in times["transformers"].seconds],
    }
