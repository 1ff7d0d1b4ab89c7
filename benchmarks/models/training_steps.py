"""Whole steps of pre-training on one device: forward, backward, optimizer; ours against transformers', with MFU.

Masked words (15 % of tokens) and next sentences, dropout 0.1, erf-GELU, fp32 parameters under autocast to bf16,
PyTorch's fused AdamW for everybody. Contestants hold equal weights, which are drawn once and copied, all of it on the
device, and see the same tokens:

    bert_fast   BertForPreTraining on packed tokens and masked_lm_positions, as a loader of ours would hand them over
    graph       the same step, captured once and replayed as a CUDA graph (`graphs.CapturedStep`); none on a CPU
    fused       transformers' BertForPreTraining after `bert_fast.fuse`, on the padded batch
    fused_graphs  the same after `bert_fast.fuse(model, graphs=...)`: its layers as two CUDA graphs; none on a CPU
    sdpa        transformers' BertForPreTraining with SDPA, on the padded batch
    eager       the same with its own attention
    flash       the same on flattened inputs, with PyTorch's own FlashAttention-2 (`flash`); where lengths differ
    compiled    the same with SDPA under torch.compile, for the one shape

Of other families than BERT, masked words alone, on the padded batch; theirs is what has a vocabulary of 250,002 words:

    labelled    transformers' model after `bert_fast.fuse`, asked for no scores but those of labelled words
    fused       the same, with all scores
    sdpa        transformers' model

Without dropout all of them must have the same loss, or the case is red and not timed.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from benchmarks.kit.bert import LABEL_SHARE
from benchmarks.kit.clock import Times, interleaved
from benchmarks.kit.results import reason
from benchmarks.models import flash
from benchmarks.models.build import our_model, their_model, with_weights_of
from benchmarks.models.families import FAMILIES
from benchmarks.models.step_cases import COMPILED_PROVIDERS, FUSED_GRAPHS, GRAPH, StepCase
from bert_fast import fuse, graphs
from bert_fast.testing.tolerances import RELATIVE

STEADY_STEPS = 5  # queued one after the other before the host waits for the device, as a training loop does
WARMUP_STEPS = 3  # a graph is captured in the step after them


@dataclass(frozen=True)
class Batch:
    """The same tokens and labels, padded, packed and flattened (as `flash` has it); all on the device."""

    padded: dict[str, Tensor]
    packed: dict[str, Any]
    flattened: dict[str, Any]
    lengths: list[int]
    num_labels: int


def model_flops(case: StepCase, lengths: list[int], num_labels: int) -> int:
    """Floating-point operations of a step's matrix products on real tokens: forward, and twice that backward."""
    hidden = case.size.hidden
    sentences = len(lengths) * 2 * hidden * (hidden + 2) if case.is_bert else 0
    return case.size.training_flops(lengths, num_labels, case.vocab_size) + 3 * sentences


def draw_words(case: StepCase, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
    """(lengths, which positions are words, input_ids): random words, padded to the longest; the last two [B, S]."""
    lengths = case.draw()
    keep = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    padding = FAMILIES[case.family].pad_token_id
    input_ids = torch.randint(padding + 1, case.vocab_size, keep.shape, generator=generator)
    return lengths, keep, input_ids.masked_fill(~keep, padding)


def boundaries(keep: Tensor) -> Tensor:
    """cu_seqlens of the words."""
    return nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()


def make_batch(case: StepCase, device: torch.device) -> Batch:
    """Random words, of which every sequence is asked for 15 %, and random answers to "is it the next sentence"."""
    generator = torch.Generator().manual_seed(1)
    lengths, keep, input_ids = draw_words(case, generator)
    is_asked = (torch.rand(keep.shape, generator=generator) < LABEL_SHARE) & keep
    is_asked[0, 0] = True
    words = torch.randint(1, case.vocab_size, keep.shape, generator=generator)
    of_sentences = {}
    if case.is_bert:
        of_sentences["next_sentence_label"] = torch.randint(0, 2, (len(lengths),), generator=generator)
    padded = {"input_ids": input_ids, "attention_mask": keep.long(), "labels": words.masked_fill(~is_asked, -100)}
    packed = {
        "input_ids": input_ids[keep],
        "cu_seqlens": boundaries(keep),
        "max_seqlen": max(lengths),
        "masked_lm_positions": is_asked[keep].nonzero().squeeze(1),
        "labels": words[is_asked],
    }
    flattened = flash.flattened(packed, padded["labels"][keep])
    forms = [on_device(form | of_sentences, device) for form in (padded, packed, flattened)]
    return Batch(*forms, lengths, int(is_asked.sum()))


def on_device(form: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A form of a batch, made on the CPU."""
    return {name: given.to(device) if isinstance(given, Tensor) else given for name, given in form.items()}


def budget_of(batch: Batch) -> graphs.Budget:
    """What the batch fills."""
    return graphs.Budget(sum(batch.lengths), len(batch.lengths), max(batch.lengths), batch.num_labels)


def their_step_model(case: StepCase, attention: str = "sdpa") -> nn.Module:
    """transformers' model of the case, with random weights."""
    options = {"vocab_size": case.vocab_size}
    if case.is_bert:
        options["max_position_embeddings"] = max(512, case.max_len)
    model: nn.Module = their_model(case.kind, case.size, attention, **options)
    return model


def draw_donor(case: StepCase, device: torch.device) -> nn.Module:
    """transformers' model with SDPA, whose weights all contestants get: the only ones that are drawn, on the device."""
    torch.manual_seed(0)
    with device:
        return their_step_model(case)


class Contestant:
    """A model with its optimizer and its form of the batch.

    attentions: of transformers' models, by provider, where it is not SDPA. donor: whose weights the model gets.
    host_seconds: of every step so far, until the host had queued all of it. last_loss: of the last step, without its
    graph. Raises BackendError without CUDA where layers are graphs.
    """

    attentions: ClassVar[dict[str, str]] = {"eager": "eager", flash.FLASH: flash.ATTENTION}

    def __init__(self, provider: str, case: StepCase, batch: Batch, donor: nn.Module, compile_backend: str) -> None:
        self._device = batch.padded["input_ids"].device
        self._is_flattened = provider == flash.FLASH
        self._inputs = self._inputs_of(provider, batch)
        self.model = self._model_of(provider, case, batch, donor).train()
        self._call: Callable[..., Any] = self.model
        if provider == "compiled":
            self._call = torch.compile(self.model, backend=compile_backend, dynamic=False)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=provider == GRAPH
        )  # fmt: skip
        self.last_loss: Tensor | None = None
        self.host_seconds: list[float] = []

    def _inputs_of(self, provider: str, batch: Batch) -> dict[str, Any]:
        if provider in ("bert_fast", GRAPH):
            return batch.packed
        if self._is_flattened:
            return batch.flattened
        return dict(batch.padded) | ({"output_logits": False} if provider == "labelled" else {})

    def _model_of(self, provider: str, case: StepCase, batch: Batch, donor: nn.Module) -> nn.Module:
        if provider in ("bert_fast", GRAPH):
            return our_model(donor)
        if provider == FUSED_GRAPHS:
            graphs.check_device(provider, self._device)
        if self._is_flattened:
            flash.register()
        attention = self.attentions.get(provider, "sdpa")
        theirs = with_weights_of(donor, lambda: their_step_model(case, attention))
        if provider == FUSED_GRAPHS:
            return fuse(theirs, graphs=[budget_of(batch)])
        return fuse(theirs) if provider in ("fused", "labelled") else theirs

    def loss(self) -> Tensor:
        """Of the batch."""
        with torch.autocast(self._device.type, torch.bfloat16):
            return self._loss_of_flattened() if self._is_flattened else self._call(**self._inputs).loss

    def _loss_of_flattened(self) -> Tensor:
        return flash.pretraining_loss(self.model, self._inputs)

    def step(self) -> None:
        """One whole step; returns when the device is through."""
        began = time.perf_counter()
        self._queue()
        self.host_seconds.append(time.perf_counter() - began)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def steps(self, count: int) -> None:
        """As many steps, each queued as soon as the host is through with the one before; waits for the device once."""
        for _ in range(count):
            self._queue()
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

    def _queue(self) -> None:
        """All of a step, whether the device is through or not."""
        loss = self.loss()
        loss.backward()
        self._optimize()
        self.last_loss = loss.detach()

    def _optimize(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class CapturedContestant(Contestant):
    """A step that is replayed as one CUDA graph, on a batch that fills its budget; BackendError without CUDA."""

    def __init__(self, provider: str, case: StepCase, batch: Batch, donor: nn.Module, compile_backend: str) -> None:
        device = batch.padded["input_ids"].device
        graphs.check_device(provider, device)
        super().__init__(provider, case, batch, donor, compile_backend)
        self._captured = graphs.CapturedStep(self._whole, [budget_of(batch)], device=device, num_warmup=WARMUP_STEPS)

    def _whole(self, inputs: dict[str, Any]) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            loss: Tensor = self.model(**inputs).loss
        loss.backward()
        self._optimize()
        return loss.detach()

    def _queue(self) -> None:
        self.last_loss = self._captured(self._inputs)


def make_contestant(
    provider: str, case: StepCase, batch: Batch, donor: nn.Module, compile_backend: str = "inductor"
) -> Contestant:
    """One of the case's `providers` or `COMPILED_PROVIDERS`, with the donor's weights."""
    return (CapturedContestant if provider == GRAPH else Contestant)(provider, case, batch, donor, compile_backend)


def compile_step(case: StepCase, device: torch.device, compile_backend: str) -> None:
    """Makes torch.compile store the step that `time_steps` will run."""
    make_contestant("compiled", case, make_batch(case, device), draw_donor(case, device), compile_backend).step()


class Race:
    """Contestants of a case, who get the donor's weights and take turns.

    rounds: counted steps of each. matmul_tflop_s, compile_backend: see `time_steps`.
    """

    steady_rounds = 0  # of `STEADY_STEPS` steps each, whose time without a wait in between is a result of its own
    has_graph = True  # a step of ours is captured as one graph, too

    def __init__(
        self, case: StepCase, device: torch.device, rounds: int, matmul_tflop_s: float | None, compile_backend: str
    ) -> None:
        self._case, self._rounds, self._matmul_tflop_s = case, rounds, matmul_tflop_s
        self._compile_backend = compile_backend
        self._batch, self._donor = self._drawn(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            self._loss = float(self._donor.eval()(**self._batch.padded).loss)
        self.contestants: dict[str, Contestant] = {}
        self._peaks: dict[str, int | None] = {}

    def _drawn(self, device: torch.device) -> tuple[Batch, nn.Module]:
        return make_batch(self._case, device), draw_donor(self._case, device)

    def _made(self, provider: str) -> Contestant:
        return make_contestant(provider, self._case, self._batch, self._donor, self._compile_backend)

    def _problem(self, contestant: Contestant) -> str | None:
        """What is wrong with the results of a contestant in evaluation."""
        loss = float(contestant.loss())
        is_right = abs(loss - self._loss) <= RELATIVE["training_step_loss_bf16"] * abs(self._loss)
        return None if is_right else f"loss {loss:.4f}, transformers' {self._loss}"

    def _flops(self) -> int:
        return model_flops(self._case, self._batch.lengths, self._batch.num_labels)

    def enter(self, provider: str) -> Iterator[dict[str, Any]]:
        """Makes a contestant and has it warm up; yields why it is left out, if it is."""
        try:
            contestant = self._made(provider)
            contestant.model.eval()
            with torch.no_grad():
                problem = self._problem(contestant)
            if problem is not None:
                yield {"provider": provider, "skipped": f"red: {problem}"}
                return
            contestant.model.train()
            for _ in range(WARMUP_STEPS):
                contestant.step()
            self._peaks[provider] = contestant.peak_bytes()
            self.contestants[provider] = contestant
        except Exception as failure:  # memory of the device, or the compiler: its result
            yield {"provider": provider, "skipped": reason(failure, 300)}

    def times(self, known: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Results of all who are there, in turn; without those that are known."""
        times = interleaved({name: one.step for name, one in self.contestants.items()}, self._rounds)
        runs = {name: partial(one.steps, STEADY_STEPS) for name, one in self.contestants.items()}
        steady = interleaved(runs, self.steady_rounds, warmup=0) if self.steady_rounds else {}
        for provider, taken in times.items():
            loss = float(cast(Tensor, self.contestants[provider].last_loss))
            if provider in known:
                continue
            if not math.isfinite(loss):
                yield {"provider": provider, "skipped": f"red: loss {loss} in training"}
                continue
            result = self._result(provider, taken)
            if provider in steady:
                result["ms_steady"] = round(steady[provider].median * 1e3 / STEADY_STEPS, 3)
            ours = times.get(self._case.providers[0])
            yield result | {"bert_fast_speedup": None if ours is None else round(ours.speedup_over(taken), 3)}

    def _result(self, provider: str, taken: Times) -> dict[str, Any]:
        case, batch, contestant = self._case, self._batch, self.contestants[provider]
        host_seconds = statistics.median(contestant.host_seconds[-self._rounds :])
        real, ceiling = sum(batch.lengths), self._matmul_tflop_s
        tflop_s = self._flops() / taken.median / 1e12
        return {
            "case": case.name,
            "provider": provider,
            "fill": round(real / batch.padded["input_ids"].numel(), 4),
            **taken.milliseconds(),
            "host_ms": round(host_seconds * 1e3, 3),
            "sequences_per_s": round(case.batch_size / taken.median, 1),
            "real_tokens_per_s": round(real / taken.median, 1),
            "model_tflop_s": round(tflop_s, 3),
            "mfu": None if ceiling is None else round(tflop_s / ceiling, 4),
            "matmul_ceiling_tflop_s": ceiling,
            "peak_bytes": self._peaks[provider],
            "rounds": len(taken.seconds),
        }


def time_steps(
    case: StepCase,
    device: torch.device,
    *,
    rounds: int,
    matmul_tflop_s: float | None,
    compile_backend: str = "inductor",
    is_compiled: bool = False,
    race_of: type[Race] = Race,
) -> Iterator[dict[str, Any]]:
    """Yields a result for each contestant, or {"provider", "skipped"}: it failed, or its loss is not the others'.

    A graph comes last, in turn with bert_fast alone: its memory stays with it, and no other result waits for it.

    matmul_tflop_s: what the device reaches in a large matrix product, for MFU; None: not measured.
    is_compiled: time transformers' model under torch.compile, in place of the uncompiled ones but SDPA.
    race_of: what kind of race the case is.
    """
    race = race_of(case, device, rounds, matmul_tflop_s, compile_backend)
    for provider in COMPILED_PROVIDERS if is_compiled else case.providers:
        yield from race.enter(provider)
    yield from race.times()
    if race.has_graph and case.is_bert and not is_compiled:
        known = list(race.contestants)
        for provider in known:
            if provider != "bert_fast":
                del race.contestants[provider]
        yield from race.enter(GRAPH)
        if GRAPH in race.contestants:
            yield from race.times(known)
