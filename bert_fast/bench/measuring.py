"""The comparison itself: one model twice, untouched and fused, taking turns on the same batch."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert_fast.bench.cases import Case, Size
from bert_fast.huggingface import fuse

# Of the hidden states of one model computed in two ways, whose elements are about 1 in size: rounding of 12 layers, in
# fp32, and in bf16 under autocast.
MOST_DIFFERENCE = {"cpu": 1e-3, "cuda": 0.15}
_MOST_ROUNDS = 7


@dataclass(frozen=True)
class Timing:
    """Rounds of one contestant: how many real tokens (padding does not count) it got through, in how many seconds."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(count / s for count, s in zip(self.tokens, self.seconds, strict=True))

    def speedup_over(self, other: "Timing") -> float:
        """Median over the rounds that both took part in of (other's time / my time in the same round)."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=False))


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device is done."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Result:
    """A case as it was measured.

    share: of the batch's positions, those that hold a token. difference: the largest between the hidden states of both
    models without dropout, over all tokens.
    """

    case: Case
    fused: Timing
    untouched: Timing
    share: float
    difference: float

    @property
    def ratio(self) -> float:
        """How many times as fast the fused model is: the median over rounds."""
        return self.fused.speedup_over(self.untouched)


def compare(cases: tuple[Case, ...], seconds: float, device: torch.device) -> Iterator[Result]:
    """Measures one case after another, in all about `seconds`; each has at least two rounds.

    On a GPU both models run under autocast to bf16, on a CPU in fp32.
    """
    end = time.monotonic() + seconds
    models: dict[str, nn.Module] = {}
    size = None
    for index, case in enumerate(cases):
        if case.size is not size:
            size = case.size
            models = _models(size, device)
        yield _measured(case, models, (end - time.monotonic()) / (len(cases) - index), device)


def _models(size: Size, device: torch.device) -> dict[str, nn.Module]:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**size.config)
    untouched = transformers.BertModel(config, add_pooling_layer=False).to(device)
    return {"fused": fuse(copy.deepcopy(untouched)), "untouched": untouched}


def _measured(case: Case, models: dict[str, nn.Module], seconds: float, device: torch.device) -> Result:
    batch = _batch(case, device)
    keep = batch["attention_mask"].bool()
    with torch.inference_mode(), _precision(device):
        hidden = [model.eval()(**batch).last_hidden_state[keep].float() for model in models.values()]
    difference = float((hidden[0] - hidden[1]).abs().max())
    for model in models.values():
        model.train(case.is_training)
    width = case.size.config["hidden_size"]
    gradient = torch.randn(*keep.shape, width, device=device) * keep[:, :, None] if case.is_training else None
    steps = {name: _step(model, batch, gradient, device) for name, model in models.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    begin, rounds = time.monotonic(), 0
    if case.is_training:  # inference has warmed up above
        for step in steps.values():
            timed(step, device)
    while rounds < 2 or (rounds < _MOST_ROUNDS and (time.monotonic() - begin) * (rounds + 2) / (rounds + 1) < seconds):
        for name, step in steps.items():
            taken[name].append(timed(step, device))
        rounds += 1
    tokens = int(keep.sum())
    times = {name: Timing((tokens,) * rounds, tuple(values)) for name, values in taken.items()}
    return Result(case, times["fused"], times["untouched"], tokens / keep.numel(), difference)


def _batch(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Random words with their mask; the texts in an order that is not that of their lengths."""
    lengths = torch.tensor(case.lengths)[torch.randperm(len(case.lengths))]
    keep = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    input_ids = torch.randint(1000, 30000, keep.shape) * keep
    return {"input_ids": input_ids.to(device), "attention_mask": keep.long().to(device)}


def _step(
    model: nn.Module, batch: dict[str, Tensor], gradient: Tensor | None, device: torch.device
) -> Callable[[], None]:
    def inference() -> None:
        with torch.inference_mode(), _precision(device):
            model(**batch)

    def training() -> None:
        with _precision(device):
            hidden = model(**batch).last_hidden_state
        hidden.backward(gradient.to(hidden.dtype) if gradient is not None else None)
        model.zero_grad(set_to_none=True)

    return inference if gradient is None else training


def _precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)
