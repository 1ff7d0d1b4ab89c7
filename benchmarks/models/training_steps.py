"""Whole steps of pre-training on one device: forward, backward, optimizer; ours against transformers', with MFU.

Masked words (15 % of tokens) and next sentences, dropout 0.1, erf-GELU, fp32 parameters under autocast to bf16,
PyTorch's fused AdamW for everybody. Contestants hold equal weights and see the same tokens:

    bert_fast   BertForPreTraining on packed tokens and masked_lm_positions, as a loader of ours would hand them over
    fused       transformers' BertForPreTraining after `bert_fast.fuse`, on the padded batch
    sdpa        transformers' BertForPreTraining with SDPA, on the padded batch
    eager       the same with its own attention
    compiled    the same with SDPA under torch.compile, for the one shape

Without dropout all of them must have the same loss, or the case is red and not timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.bert import BY_NAME, LABEL_SHARE, VOCAB_SIZE, Size
from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import reason
from benchmarks.models.build import draw_lengths, our_model, their_model
from benchmarks.registry import Case
from bert_fast import fuse
from bert_fast.testing.tolerances import RELATIVE

PROVIDERS = ("bert_fast", "fused", "sdpa", "eager")
COMPILED_PROVIDERS = ("bert_fast", "sdpa", "compiled")  # apart: the compiler takes longer than all of the others


@dataclass(frozen=True)
class StepCase:
    """One batch. lengths: "full", "even" (any length from 1 to max_len) or a file of stored length distributions.

    is_compiled: transformers' model is timed under torch.compile too, which takes a minute to compile it.
    """

    shape: str
    lengths: str
    max_len: int
    batch_size: int
    is_compiled: bool = False
    vocab_size: int = VOCAB_SIZE

    @property
    def name(self) -> str:
        """Stable name used in results."""
        return f"step/{self.shape}/{self.lengths}@{self.max_len}/B{self.batch_size}"

    @property
    def size(self) -> Size:
        """Widths of the model."""
        return BY_NAME[self.shape]

    def draw(self) -> list[int]:
        """Lengths of the sequences; of `max_len` at least one."""
        if self.lengths == "even":
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(1, self.max_len + 1, (self.batch_size,), generator=generator).tolist()
            return [self.max_len, *drawn[1:]]
        case = Case(self.shape, self.lengths, self.max_len, "random", "training", self.batch_size)
        return draw_lengths(case, 1)[0]


# The most telling first: should time run out, the others are missing.
CASES = (
    StepCase("large", "full", 512, 32),
    StepCase("base", "full", 128, 256, is_compiled=True),
    StepCase("large", "even", 512, 64),
    StepCase("base", "full", 512, 64, is_compiled=True),
    StepCase("base", "squad_windows_512_stride128", 512, 64),
)
SMALL_CASES = (StepCase("tiny", "even", 16, 4, is_compiled=True, vocab_size=100),)


@dataclass(frozen=True)
class Batch:
    """The same tokens and labels, padded and packed; all on the device."""

    padded: dict[str, Tensor]
    packed: dict[str, Any]
    lengths: list[int]
    num_labels: int


def model_flops(case: StepCase, lengths: list[int], num_labels: int) -> int:
    """Floating-point operations of a step's matrix products on real tokens: forward, and twice that backward."""
    size, hidden = case.size, case.size.hidden
    encoder = sum(lengths) * size.encoder_flops_per_token
    scores = sum(length**2 for length in lengths) * 4 * hidden * size.layers
    words = num_labels * 2 * hidden * (hidden + case.vocab_size)
    sentences = len(lengths) * 2 * hidden * (hidden + 2)
    return 3 * (encoder + scores + words + sentences)


def make_batch(case: StepCase, device: torch.device) -> Batch:
    """Random words, of which every sequence is asked for 15 %, and random answers to "is it the next sentence"."""
    generator = torch.Generator().manual_seed(1)
    lengths = case.draw()
    keep = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]  # [B, S]
    input_ids = torch.randint(1, case.vocab_size, keep.shape, generator=generator) * keep
    is_asked = (torch.rand(keep.shape, generator=generator) < LABEL_SHARE) & keep
    is_asked[0, 0] = True
    words = torch.randint(1, case.vocab_size, keep.shape, generator=generator)
    next_sentence_label = torch.randint(0, 2, (len(lengths),), generator=generator).to(device)
    padded = {"input_ids": input_ids, "attention_mask": keep.long(), "labels": words.masked_fill(~is_asked, -100)}
    packed = {
        "input_ids": input_ids[keep],
        "cu_seqlens": nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int(),
        "masked_lm_positions": is_asked[keep].nonzero().squeeze(1),
        "labels": words[is_asked],
    }
    return Batch(
        {name: t.to(device) for name, t in padded.items()} | {"next_sentence_label": next_sentence_label},
        {name: t.to(device) for name, t in packed.items()}
        | {"max_seqlen": max(lengths), "next_sentence_label": next_sentence_label},
        lengths,
        int(is_asked.sum()),
    )


class Contestant:
    """A model with its optimizer and its form of the batch."""

    def __init__(self, provider: str, case: StepCase, batch: Batch, compile_backend: str) -> None:
        device = batch.padded["input_ids"].device
        self._device = device
        self._inputs = batch.packed if provider == "bert_fast" else batch.padded
        self.model = _make_model(provider, case).to(device).train()
        self._call: Callable[..., Any] = self.model
        if provider == "compiled":
            self._call = torch.compile(self.model, backend=compile_backend, dynamic=False)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self) -> Tensor:
        """Of the batch."""
        with torch.autocast(self._device.type, torch.bfloat16):
            return self._call(**self._inputs).loss

    def step(self) -> None:
        """One whole step; returns when the device is through."""
        self.loss().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int | None:
        """Memory at the height of a step; None on a CPU."""
        if self._device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.step()
        return torch.cuda.max_memory_allocated(self._device) - before


def _make_model(provider: str, case: StepCase) -> nn.Module:
    torch.manual_seed(0)
    theirs: nn.Module = their_model(
        "BertForPreTraining", case.size, "eager" if provider == "eager" else "sdpa",
        vocab_size=case.vocab_size, max_position_embeddings=max(512, case.max_len),
    )  # fmt: skip
    return fuse(theirs) if provider == "fused" else our_model(theirs) if provider == "bert_fast" else theirs


def compile_step(case: StepCase, device: torch.device, compile_backend: str) -> None:
    """Makes torch.compile store the step that `time_steps` will run."""
    Contestant("compiled", case, make_batch(case, device), compile_backend).step()


def time_steps(
    case: StepCase,
    device: torch.device,
    *,
    rounds: int,
    matmul_tflop_s: float | None,
    compile_backend: str = "inductor",
    is_compiled: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields a result for each contestant, or {"provider", "skipped"}: it failed, or its loss is not the others'.

    matmul_tflop_s: what the device reaches in a large matrix product, for MFU; None: not measured.
    is_compiled: time transformers' model under torch.compile, in place of the uncompiled ones but SDPA.
    """
    batch = make_batch(case, device)
    contestants: dict[str, Contestant] = {}
    peaks: dict[str, int | None] = {}
    losses: dict[str, float] = {}
    for provider in COMPILED_PROVIDERS if is_compiled else PROVIDERS:
        try:
            contestant = Contestant(provider, case, batch, compile_backend)
            contestant.model.eval()
            with torch.no_grad():
                losses[provider] = float(contestant.loss())
            contestant.model.train()
            contestant.step()
            peaks[provider] = contestant.peak_bytes()
            contestants[provider] = contestant
        except Exception as failure:  # memory of the device, or the compiler: its result
            yield {"provider": provider, "skipped": reason(failure, 300)}
    theirs = losses.get("sdpa")
    for provider in list(contestants):
        if theirs is None or abs(losses[provider] - theirs) > RELATIVE["training_step_loss_bf16"] * abs(theirs):
            del contestants[provider]
            yield {"provider": provider, "skipped": f"red: loss {losses[provider]:.4f}, transformers' {theirs}"}
    times = interleaved({name: contestant.step for name, contestant in contestants.items()}, rounds)
    flops, real = model_flops(case, batch.lengths, batch.num_labels), sum(batch.lengths)
    for provider, taken in times.items():
        tflop_s = flops / taken.median / 1e12
        low, high = taken.quantiles()
        yield {
            "case": case.name,
            "provider": provider,
            "fill": round(real / batch.padded["input_ids"].numel(), 4),
            "ms": round(taken.median * 1e3, 3),
            "ms_p20": round(low * 1e3, 3),
            "ms_p80": round(high * 1e3, 3),
            "sequences_per_s": round(case.batch_size / taken.median, 1),
            "real_tokens_per_s": round(real / taken.median, 1),
            "model_tflop_s": round(tflop_s, 3),
            "mfu": None if matmul_tflop_s is None else round(tflop_s / matmul_tflop_s, 4),
            "matmul_ceiling_tflop_s": matmul_tflop_s,
            "peak_bytes": peaks[provider],
            "bert_fast_speedup": round(times["bert_fast"].speedup_over(taken), 3) if "bert_fast" in times else None,
            "rounds": len(taken.seconds),
        }
