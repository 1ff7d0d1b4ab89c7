"""Whole steps of fine-tuning on one device: sequence classification, ours against transformers' and flash attention.

As a recipe of transformers has it: bf16 autocast, dropout 0.1, gradients clipped to a norm of 1, PyTorch's fused AdamW.
`bert_fast`, `fused`, `fused_graphs`, `sdpa`, `flash` and `compiled` are what `training_steps` describes.
A contestant is timed only if its logits in evaluation are as near to those of transformers' model in fp64 as that
model's own under autocast (`fast_model` of the table of tolerances).
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.models import flash, training_steps
from benchmarks.models.step_cases import FUSED_GRAPHS, StepCase
from benchmarks.models.training_steps import Batch, Contestant, Race, boundaries, draw_words, model_flops, on_device
from bert_fast.testing.compare import assert_close_to_truth

PROVIDERS = ("bert_fast", "fused", FUSED_GRAPHS, "sdpa", flash.FLASH)
MAX_NORM = 1.0


@dataclass(frozen=True)
class FinetuneCase(StepCase):
    """One batch of texts, each with one of two labels; the fields of `StepCase`."""

    @property
    def name(self) -> str:
        return f"finetune/{self.shape}/{self.lengths}@{self.max_len}/B{self.batch_size}"

    @property
    def kind(self) -> str:
        return "BertForSequenceClassification"

    @property
    def providers(self) -> tuple[str, ...]:
        return PROVIDERS


CASES = (
    FinetuneCase("base", "full", 128, 32, is_compiled=True),
    FinetuneCase("base", "squad_windows_512_stride128", 512, 16, is_compiled=True),
)
SMALL_CASES = (FinetuneCase("tiny", "even", 16, 4, is_compiled=True, vocab_size=100),)


def make_batch(case: StepCase, device: torch.device) -> Batch:
    """Random words and labels."""
    generator = torch.Generator().manual_seed(1)
    lengths, keep, input_ids = draw_words(case, generator)
    labels = torch.randint(0, 2, (len(lengths),), generator=generator)
    padded = {"input_ids": input_ids, "attention_mask": keep.long(), "labels": labels}
    packed = {
        "input_ids": input_ids[keep], "cu_seqlens": boundaries(keep), "max_seqlen": max(lengths), "labels": labels,
    }  # fmt: skip
    forms = [on_device(form, device) for form in (padded, packed, flash.flattened(packed, labels))]
    return Batch(*forms, lengths, len(lengths))


def draw_donor(case: StepCase, device: torch.device) -> nn.Module:
    """transformers' model with SDPA; weights so large that a text that sees another one has other logits."""
    donor = training_steps.draw_donor(case, device)
    with torch.no_grad():
        for name, parameter in donor.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.05)
    return donor


class FinetuneContestant(Contestant):
    """A classifier with its form of the batch."""

    def logits(self) -> Tensor:
        """[B, 2], of the batch."""
        with torch.autocast(self._device.type, torch.bfloat16):
            if self._is_flattened:
                return flash.classified(self.model, self._inputs)
            return cast(Tensor, self._call(**self._inputs).logits)

    def _loss_of_flattened(self) -> Tensor:
        return nn.functional.cross_entropy(flash.classified(self.model, self._inputs), self._inputs["labels"])

    def _optimize(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        super()._optimize()


class FinetuneRace(Race):
    """Contestants of a case of fine-tuning; also timed without a wait after every step."""

    steady_rounds = 3
    has_graph = False

    def _drawn(self, device: torch.device) -> tuple[Batch, nn.Module]:
        batch, donor = make_batch(self._case, device), draw_donor(self._case, device).eval()
        inputs = {name: batch.padded[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            with torch.autocast(device.type, torch.bfloat16):
                self._plain = donor(**inputs).logits
            self._truth = donor.double()(**inputs).logits
        donor.float()  # which holds no more than fp32 did
        return batch, donor

    def _made(self, provider: str) -> Contestant:
        return FinetuneContestant(provider, self._case, self._batch, self._donor, self._compile_backend)

    def _problem(self, contestant: Contestant) -> str | None:
        logits = cast(FinetuneContestant, contestant).logits()
        scale = self._truth.abs().max()
        actual, plain = ((t.double() / scale).bfloat16() for t in (logits, self._plain))
        try:
            assert_close_to_truth("fast_model", "output", actual, plain, self._truth / scale)
        except AssertionError as failure:
            return f"logits: {failure}"
        return super()._problem(contestant)

    def _flops(self) -> int:
        return model_flops(self._case, self._batch.lengths, 0)


time_steps = partial(training_steps.time_steps, race_of=FinetuneRace)
