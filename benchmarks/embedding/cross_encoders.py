"""Cross-encoders on a CPU: scores of pairs and training steps, fused beside sentence-transformers, compiled or not.

Random weights, fp32. Queries are XQuAD's questions, passages its paragraphs of 100 to 300 tokens. A batch is, in the
order "as they come", a query with its passages; "sorted", pairs of similar length, drawn evenly from sixteen times as
many pairs in the order of their numbers of tokens. (`predict` itself sorts by characters, which leaves more padding.)

    untouched  sentence-transformers' CrossEncoder, whose attention is PyTorch's SDPA, on padded batches
    compiled   the same after its `compile(dynamic=True)`, which its documentation asks for with several lengths
    fused      the same after `bert_fast.fuse`

    score  `predict` of each batch
    train  its BinaryCrossEntropyLoss of each batch, tokenizing, forward and backward, dropout 0.1; no optimizer, which
           costs all the same

sentence-transformers' own removal of padding (`unpad_inputs`) is for models without a head: here it is no contestant.
They take turns, by CPU time of the process. All must have the same scores, or without dropout the same loss and
gradients, or there is no result. `compiled_first_s`: seconds of the first batches under the compiler, which finds in
its cache what it compiled before (nothing with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.embedding.contrastive import pairs_of
from benchmarks.kit.bert import BY_NAME
from benchmarks.kit.clock import interleaved
from benchmarks.models.build import their_model
from benchmarks.recipes.data import minilm
from bert_fast import BertTokenizer, fuse, why_not

PROVIDERS = ("untouched", "compiled", "fused")
ORDERS = ("as they come", "sorted")
PASSAGE_TOKENS = range(100, 301)
SPREAD = 16
# fp32 sums in other orders. Scores lie between 0 and 1, the loss is about 0.7; gradients are divided by the largest
# element of their tensor, or by a share of the largest of all where that is more.
_SCORES, _LOSS = "scores", "loss"
_AGREE = {_SCORES: 1e-6, _LOSS: 1e-6}
_GRADIENTS_AGREE, _SMALLEST_SCALE = 1e-4, 1e-3
Pair = tuple[str, str]
Batches = list[list[Pair]]


@dataclass(frozen=True)
class CrossCase:
    """A model's shape, with fewer layers where `layers` says so, and how many passages each of its queries has.

    work: "score" or "train".
    """

    shape: str
    work: str
    queries: int
    passages: int
    layers: int | None = None

    @property
    def name(self) -> str:
        """What the names of its results, one for each order, begin with."""
        layers = "" if self.layers is None else f", {self.layers} layers"
        return f"cross_encoder/{self.shape}{layers}/{self.work}"

    def batches(self, order: str) -> Batches:
        """Of as many pairs as a query has passages, and as many as there are queries."""
        size = self.passages
        if order == "as they come":
            pairs = query_pairs(self.queries, size)
        else:
            pairs = query_pairs(SPREAD * self.queries, size)
            ids = tokenizer()(*map(list, zip(*pairs, strict=True)))["input_ids"]
            pairs = [pairs[i] for i in sorted(range(len(pairs)), key=lambda i: len(ids[i]))]
        step = len(pairs) // self.queries
        return [pairs[i : i + size] for i in range((step - size) // 2, len(pairs), step)]


CASES = (
    CrossCase("minilm", "score", 2, 32),
    CrossCase("minilm", "train", 1, 16),
    CrossCase("base", "score", 1, 32, layers=4),
    CrossCase("base", "train", 1, 8, layers=4),
)


def tokenizer() -> BertTokenizer:
    """MiniLM's. FileNotFoundError where it is not installed."""
    return BertTokenizer.from_pretrained(minilm())


def answered() -> list[Pair]:
    """Questions, each with the passage that answers it. FileNotFoundError where the texts are not there."""
    cut = {"add_special_tokens": False, "truncation": True, "max_length": PASSAGE_TOKENS.stop}
    texts = pairs_of(10**6)
    lengths = map(len, tokenizer()([passage for _, passage in texts], **cut)["input_ids"])
    return [pair for pair, length in zip(texts, lengths, strict=True) if length in PASSAGE_TOKENS]


def query_pairs(queries: int, passages: int) -> list[Pair]:
    """Each query with its passages, one query after the other; a query's first passage answers it."""
    found = answered()
    at = [found[i % len(found)] for i in range(queries * passages)]
    return [(at[i - i % passages][0], passage) for i, (_, passage) in enumerate(at)]


class Contestant:
    """A cross-encoder. `run` does all of its work on some batches once."""

    def __init__(self, name: str, case: CrossCase, folder: Path) -> None:
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

        self.model = CrossEncoder(str(folder), num_labels=1, device="cpu").train()
        if name == "compiled":
            self.model.compile(dynamic=True)
        if name == "fused" and (reasons := why_not(fuse(self.model))):
            raise RuntimeError(f"{case.name}: not fused: {reasons}")
        self._is_scoring = case.work == "score"
        self._answers = set(answered())
        self._loss = BinaryCrossEntropyLoss(self.model)

    def run(self, batches: Batches) -> None:
        """Scores of all pairs, or a step for each batch."""
        if self._is_scoring:
            self._scores(batches)
        else:
            for batch in batches:
                self._step(batch)

    def results(self, batches: Batches) -> dict[str, Tensor]:
        """Scores; or, without dropout, the loss of the first batch and its gradients by the parameters' names."""
        if self._is_scoring:
            return {_SCORES: self._scores(batches)}
        self.model.eval()
        loss = self._step(batches[0])
        self.model.train()
        return {_LOSS: loss} | {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _scores(self, batches: Batches) -> Tensor:
        return torch.cat(
            [self.model.predict(batch, batch_size=len(batch), convert_to_tensor=True) for batch in batches]
        )

    def _step(self, batch: list[Pair]) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        labels = torch.tensor([float(pair in self._answers) for pair in batch])
        loss: Tensor = self._loss([list(column) for column in zip(*batch, strict=True)], labels)
        loss.backward()
        return loss.detach()


def difference(found: dict[str, Tensor], right: dict[str, Tensor]) -> str | None:
    """What the results of one contestant differ in from another's, if they do."""
    if found.keys() != right.keys():
        return f"{', '.join(sorted(found.keys() ^ right.keys()))}: on one side alone"
    largest = {name: float(t.abs().max()) for name, t in right.items()}
    floor = _SMALLEST_SCALE * max(largest.values())
    for name, t in right.items():
        off, allowed = float((found[name] - t).abs().max()), _AGREE.get(name, _GRADIENTS_AGREE)
        if not off <= allowed * (1.0 if name in _AGREE else max(largest[name], floor)):
            return f"{name}: differs by {off:.1e}"
    return None


def write_model(case: CrossCase, folder: Path) -> None:
    """A classifier with drawn weights, and MiniLM's tokenizer."""
    torch.manual_seed(0)
    options = {} if case.layers is None else {"num_hidden_layers": case.layers}
    their_model("BertForSequenceClassification", BY_NAME[case.shape], num_labels=1, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def run_case(case: CrossCase, rounds: int) -> Iterator[dict[str, Any]]:
    """Times one case, on one thread: a result for each order. RuntimeError where contestants differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as text:
            write_model(case, folder := Path(text))
            contestants = {name: Contestant(name, case, folder) for name in PROVIDERS}
            began = time.perf_counter()
            contestants["compiled"].run(case.batches(ORDERS[0]))
            compiled_first_s = time.perf_counter() - began
            for order in ORDERS:
                yield _timed(case, order, contestants, rounds) | {"compiled_first_s": round(compiled_first_s, 1)}
    finally:
        torch.set_num_threads(before)


def _timed(case: CrossCase, order: str, contestants: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    batches = case.batches(order)
    found = {name: one.results(batches) for name, one in contestants.items()}
    for name in PROVIDERS[1:]:
        if (wrong := difference(found[name], found["untouched"])) is not None:
            raise RuntimeError(f"{case.name}/{order}: {name}: {wrong}: nothing to time")
    runs: dict[str, Callable[[], object]] = {name: partial(one.run, batches) for name, one in contestants.items()}
    times = interleaved(runs, rounds, warmup=0, clock=time.process_time)
    best = min(PROVIDERS[:2], key=lambda name: times[name].median)
    packed = [tokenizer().pack(batch) for batch in batches]
    real = sum(len(batch["input_ids"]) for batch in packed)
    return {
        "case": f"{case.name}/{order}",
        "threads": 1,
        "pairs": case.queries * case.passages,
        "real_tokens": real,
        "fill": round(real / sum(case.passages * batch["max_seqlen"] for batch in packed), 4),
        **{f"{name}_cpu_s": round(taken.median, 4) for name, taken in times.items()},
        "best_other": best,
        "ratio": round(times["fused"].speedup_over(times[best]), 3),
        **{f"{name}_all_cpu_s": [round(s, 4) for s in taken.seconds] for name, taken in times.items()},
    }
