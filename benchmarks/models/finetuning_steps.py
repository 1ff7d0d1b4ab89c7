"""Whole steps of fine-tuning on one device: sequence classification, ours against transformers' and flash attention.

As a recipe of transformers has it: bf16 autocast, dropout 0.1, gradients clipped to a norm of 1, PyTorch's fused AdamW.
Beside `bert_fast`, `fused`, `fused_graphs`, `sdpa` and `compiled`, which `training_steps` describes:

    flash       transformers' model on flattened inputs: the texts of a batch in one row, [1, T], position_ids that
                restart, cu_seq_lens; its attention is PyTorch's own FlashAttention-2 kernel for such rows. The pooler
                gets each text's first token.

A contestant is timed only if its logits in evaluation are as near to those of transformers' model in fp64 as that
model's own under autocast (`fast_model` of the table of tolerances).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from benchmarks.models import training_steps
from benchmarks.models.step_cases import FUSED_GRAPHS, StepCase
from benchmarks.models.training_steps import Batch, Contestant, Race, boundaries, draw_words, model_flops
from bert_fast.testing.compare import assert_close_to_truth

FLASH = "flash"
PROVIDERS = ("bert_fast", "fused", FUSED_GRAPHS, "sdpa", FLASH)
ATTENTION = "varlen_on_flattened_inputs"  # in the registry of transformers, which takes "flash_..." for packages
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


@dataclass(frozen=True)
class TextBatch(Batch):
    """flattened: the texts in one row, as transformers' flash attention takes them."""

    flattened: dict[str, Any]


def make_batch(case: StepCase, device: torch.device) -> TextBatch:
    """Random words and labels."""
    generator = torch.Generator().manual_seed(1)
    lengths, keep, input_ids = draw_words(case, generator)
    labels = torch.randint(0, 2, (len(lengths),), generator=generator).to(device)
    cu_seqlens = boundaries(keep).to(device)
    words, longest = input_ids[keep].to(device), max(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return TextBatch(
        {"input_ids": input_ids.to(device), "attention_mask": keep.long().to(device), "labels": labels},
        {"input_ids": words, "cu_seqlens": cu_seqlens, "max_seqlen": longest, "labels": labels},
        lengths,
        len(lengths),
        {
            "input_ids": words[None], "position_ids": positions[None], "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest, "labels": labels,
        },
    )  # fmt: skip


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, p: float, scale: float) -> Tensor:
    """PyTorch's FlashAttention-2 for texts one after the other: q, k, v and the result [T, A, D]; dropout p."""
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, p, False, False, scale=scale
    )
    return found[0]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: Any
) -> tuple[Tensor, None]:
    """As transformers calls an attention of its registry: q, k, v [1, A, T, D]; the result [1, T, A, D]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    longest, p, scale = given["max_length_q"], given.get("dropout", 0.0), given["scaling"]
    return flash_varlen(q, k, v, given["cu_seq_lens_q"], longest, p, scale)[None], None


def draw_donor(case: StepCase, device: torch.device) -> nn.Module:
    """transformers' model with SDPA; weights so large that a text that sees another one has other logits."""
    donor = training_steps.draw_donor(case, device)
    with torch.no_grad():
        for name, parameter in donor.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.05)
    return donor


class FinetuneContestant(Contestant):
    """A classifier with its form of the batch."""

    attentions: ClassVar[dict[str, str]] = {FLASH: ATTENTION}

    def _inputs_of(self, provider: str, batch: Batch) -> dict[str, Any]:
        self._is_flattened = provider == FLASH
        if not self._is_flattened:
            return super()._inputs_of(provider, batch)
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        return cast(TextBatch, batch).flattened

    def logits(self) -> Tensor:
        """[B, 2], of the batch."""
        with torch.autocast(self._device.type, torch.bfloat16):
            if self._is_flattened:
                return self._logits_of_flattened()
            return cast(Tensor, self._call(**self._inputs).logits)

    def loss(self) -> Tensor:
        if not self._is_flattened:
            return super().loss()
        with torch.autocast(self._device.type, torch.bfloat16):
            return nn.functional.cross_entropy(self._logits_of_flattened(), self._inputs["labels"])

    def _logits_of_flattened(self) -> Tensor:
        """The model pools the first token of a row: here that of each text."""
        model: Any = self.model
        inputs = {name: given for name, given in self._inputs.items() if name != "labels"}
        encoded = model.bert(**inputs).last_hidden_state[0]  # [T, H]
        first = encoded[inputs["cu_seq_lens_q"][:-1].long()]  # [B, H]
        return cast(Tensor, model.classifier(model.dropout(model.bert.pooler(first[:, None]))))

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
