"""Whole models: ours, or Hugging Face's after `fuse`, against Hugging Face's BertModel as it is.

The same weights, lengths and gradients on both sides.
"""

import copy
import json
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import DATA
from benchmarks.registry import SHAPES, Case
from bert_fast.demo.saved_bytes import saved_bytes

__all__ = ["draw_lengths", "make_models", "make_step", "padded_batch", "run_case", "saved_bytes_per_layer"]

VOCAB_SIZE = 30522


def draw_lengths(case: Case, num_batches: int) -> list[list[int]]:
    """Lengths of the sequences of every batch."""
    count = num_batches * case.batch_size
    if case.lengths == "full":
        return [[case.max_len] * case.batch_size] * num_batches
    sample = json.loads((DATA / "length_distributions" / f"{case.lengths}.json").read_text())["sample_lengths"]
    lengths = [min(length, case.max_len) for length in sample]
    if case.order == "sorted":  # windows of 50 batches, as a bucketing sampler does; batches spread over the window
        window = sorted(lengths[: 50 * case.batch_size])
        batches = [window[i : i + case.batch_size] for i in range(0, len(window), case.batch_size)]
        step = len(batches) // num_batches
        return [batches[step // 2 + i * step] for i in range(num_batches)]
    return [lengths[i : i + case.batch_size] for i in range(0, count, case.batch_size)]


def make_models(
    shape: str, dropout_p: float, num_layers: int | None = None, is_fused: bool = False
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(bert_fast's or a fused one, Hugging Face's) models of one shape with equal random weights."""
    import transformers

    import bert_fast

    size = SHAPES[shape]
    arguments = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers if num_layers is None else num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        hidden_dropout_prob=dropout_p,
        attention_probs_dropout_prob=dropout_p,
    )
    theirs = transformers.BertModel(transformers.BertConfig(**arguments, attn_implementation="sdpa"))
    if is_fused:
        return bert_fast.fuse(copy.deepcopy(theirs)), theirs
    ours = bert_fast.BertModel(bert_fast.BertConfig(**arguments))
    ours.load_state_dict(theirs.state_dict(), strict=False)
    return ours, theirs


def padded_batch(lengths: list[int]) -> dict[str, Tensor]:
    """Random ids, padded to the longest sequence, with their mask."""
    longest = max(lengths)
    keep_mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    input_ids = torch.randint(1000, VOCAB_SIZE, keep_mask.shape) * keep_mask
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


def run_case(
    case: Case, rounds: int, num_batches: int, gemm: str = "default", device: torch.device | None = None
) -> dict[str, object]:
    """Times one case; returns real tokens/s of both sides, fill, ratio, and on a CPU the ratio aimed at.

    device: None for the CPU, in fp32; elsewhere both sides run under autocast to bf16, and a round ends when the device
        is through.
    """
    device = device or torch.device("cpu")
    if gemm == "mkl":  # what a processor gets where MKL itself uses all instructions: no help from oneDNN
        from bert_fast.aten import _gemm

        _gemm._mkl_lacks_avx512 = lambda: False
    torch.manual_seed(0)
    is_training = case.mode == "training"
    pair = make_models(case.shape, 0.1 if is_training else 0.0, is_fused=case.is_fused)
    models = {name: model.to(device) for name, model in zip(("bert_fast", "transformers"), pair, strict=True)}
    batches = [
        {name: tensor.to(device) for name, tensor in padded_batch(lengths).items()}
        for lengths in draw_lengths(case, num_batches)
    ]
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    hidden = SHAPES[case.shape].hidden_size
    gradients = [
        torch.randn(*batch["input_ids"].shape, hidden, device=device) * batch["attention_mask"][:, :, None]
        if is_training
        else None
        for batch in batches
    ]
    contestants: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        model.train(is_training)
        steps = [make_step(model, batch, gradient) for batch, gradient in zip(batches, gradients, strict=True)]
        contestants[name] = lambda steps=steps: _run(steps, device)
    times = interleaved(contestants, rounds)
    fill = real / padded
    return {
        "case": case.name + ("" if gemm == "default" else f", {gemm}"),
        "fill": round(fill, 4),
        "real_tokens": real,
        "bert_fast_tokens_per_s": round(real / times["bert_fast"].median, 1),
        "transformers_tokens_per_s": round(real / times["transformers"].median, 1),
        "ratio": round(times["bert_fast"].speedup_over(times["transformers"]), 3),
        **({"goal": round(max(0.9 / fill, 0.98 if case.is_fused else 1.0), 3)} if device.type == "cpu" else {}),
        "bert_fast_s": [round(s, 4) for s in times["bert_fast"].seconds],
        "transformers_s": [round(s, 4) for s in times["transformers"].seconds],
    }


def _run(steps: list[Callable[[], None]], device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        for step in steps:
            step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved_bytes_per_layer(shape: str = "base", batch_size: int = 8, length: int = 512) -> dict[str, object]:
    """Bytes one encoder layer keeps for backward (distinct storages, without parameters), ours and Hugging Face's.

    The difference between two-layer and one-layer models, counted with saved-tensor hooks at dropout 0.1.

    On the CPU Hugging Face's eager and sdpa numbers agree: PyTorch's fused CPU attention takes no dropout, so sdpa is
    composed of the same products. PyTorch's CPU dropout keeps masks in fp32, where CUDA keeps a byte an element:
    `transformers_eager_byte_masks` is what eager would keep with such masks, the fairer number for GPUs.
    """
    import transformers

    counts: dict[str, int] = {}
    for attention in ("eager", "sdpa"):
        totals: dict[str, list[int]] = {"bert_fast": [], "transformers": []}
        for num_layers in (1, 2):
            ours, theirs = make_models(shape, 0.1, num_layers)
            theirs = transformers.BertModel._from_config(theirs.config, attn_implementation=attention)
            for name, model in (("bert_fast", ours), ("transformers", theirs)):
                model.train()
                input_ids = torch.randint(1000, VOCAB_SIZE, (batch_size, length))
                totals[name].append(saved_bytes(model, lambda: model(input_ids=input_ids).last_hidden_state))  # noqa: B023
        counts["bert_fast"] = totals["bert_fast"][1] - totals["bert_fast"][0]
        counts[f"transformers_{attention}"] = totals["transformers"][1] - totals["transformers"][0]
    size = SHAPES[shape]
    num_dropped = batch_size * length * (2 * size.hidden_size + size.num_heads * length)  # elements, a layer
    counts["transformers_eager_byte_masks"] = counts["transformers_eager"] - 3 * num_dropped
    return {
        "case": f"saved_bytes_per_layer/{shape}/B{batch_size}/S{length}",
        **counts,
        "share_of_eager": round(counts["bert_fast"] / counts["transformers_eager"], 4),
        "share_of_eager_byte_masks": round(counts["bert_fast"] / counts["transformers_eager_byte_masks"], 4),
        "share_of_sdpa": round(counts["bert_fast"] / counts["transformers_sdpa"], 4),
    }
