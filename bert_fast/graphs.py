"""CUDA graphs of whole training steps on packed batches.

A graph replays the kernels of one call, with the same shapes at the same addresses, so that the host's part of a step
shrinks to one launch. Packed batches have another number of tokens each time; a budget bounds them, and what a batch
does not use of it is filled with sequences that no label asks about:

    max_tokens = 8, max_seqlen = 3     input_ids  = [5, 6, 7, 8, 9 | 0, 0, 0]          labels = [.. | -100, -100, -100]
    batch: lengths 2, 3                cu_seqlens = [0, 2, 5 | 8, 8, ...]

    step = graphs.CapturedStep(train, [graphs.Budget(max_tokens=16384, max_sequences=128, max_seqlen=512)])
    for batch in loader:               # of `data.PackedCollator` or `tokenizer.pack`
        loss = step(batch)             # forward, backward and optimizer; fresh dropout every time
"""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bert_fast.checks import check_count, check_dtype, check_ids, check_number, check_shape, check_tensor
from bert_fast.errors import BackendError
from bert_fast.ops.packing import as_length, check_offsets

__all__ = ["Budget", "CapturedStep", "TokenBuffers", "budgets_for", "check_device"]

_IGNORED = -100  # an integer label that no loss counts
# Places within a sequence; one past the longest is in none, and no loss counts it (a negative one means the first).
_PLACES = ("start_positions", "end_positions")
_MASK = "loss_mask"
_INTEGERS = (torch.int64, torch.int32)
_PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
_CANDIDATES = 64  # of each kind: sizes that budgets may have, of thousands of batches


@dataclass(frozen=True)
class Budget:
    """The most that a batch may hold; one graph is captured for each.

    max_tokens: of all sequences together. max_sequences: their number. max_seqlen: tokens of the longest.
    max_labels: entries of masked_lm_positions, for batches that have it.
    """

    max_tokens: int
    max_sequences: int
    max_seqlen: int
    max_labels: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences", "max_seqlen", "max_labels"):
            value = getattr(self, name)
            if value is None and name == "max_labels":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def num_slots(self) -> int:
        """Sequences of a full buffer: those of the batch and as many as tokens that it does not use may need."""
        return self.max_sequences + math.ceil(self.max_tokens / self.max_seqlen)

    def reasons_against(self, batch: Mapping[str, Any]) -> list[str]:
        """What of the batch is too large, as sentences; empty where it fits. No device sync."""
        sizes = {
            "max_tokens": ("tokens", _num_tokens(batch)),
            "max_sequences": ("sequences", len(batch["cu_seqlens"]) - 1),
            "max_seqlen": ("tokens a sequence", batch["max_seqlen"]),
        }
        if "masked_lm_positions" in batch:
            sizes["max_labels"] = ("labels", len(batch["masked_lm_positions"]))
        return [
            f"{name}: expected at most {getattr(self, name)} {what}, got {size}"
            for name, (what, size) in sizes.items()
            if getattr(self, name) is None or size > getattr(self, name)
        ]


def budgets_for(sizes: Sequence[Sequence[int]], max_seqlen: int, filler: float = 0.05, most: int = 8) -> list[Budget]:
    """The fewest budgets in which batches of these sizes fill little up, by max_tokens; each batch fits into one.

    sizes: (tokens, sequences) of every batch, or (tokens, sequences, entries of masked_lm_positions).
    max_seqlen: of every budget.
    filler: tokens that are filled up, as a share of those of the budgets that all batches take: at most this, unless
        `most` budgets leave more.
    most: number of budgets.

    The last budget is as large as the largest batch. A larger budget has room for the sequences and labels of all
    batches with fewer tokens. No other choice is better; of batches of more than 128 sizes, no other among so many
    (half of them quantiles of the batches, half evenly apart on a logarithmic scale).

    Raises: TypeError, ValueError naming the argument.
    """
    batches = _checked_sizes(sizes)
    max_seqlen, most = check_count("max_seqlen", max_seqlen, 1), check_count("most", most, 1)
    if not 0 <= check_number("filler", filler) < 1:
        raise ValueError(f"filler: expected a share from 0, below 1, got {filler}")
    totals = sorted(tokens for tokens, *_ in batches)
    candidates = sorted(set(totals))
    if len(candidates) > 2 * _CANDIDATES:
        last, growth = len(totals) - 1, totals[-1] / totals[0]
        shares = [place / _CANDIDATES for place in range(1, _CANDIDATES + 1)]
        below = (bisect_right(totals, totals[0] * growth**share) - 1 for share in shares[:-1])
        candidates = sorted({totals[place] for place in (*below, *(round(last * share) for share in shares))})
    enough = sum(totals) / (1 - filler) * (1 + 1e-12)  # tokens of all budgets taken; the rest is rounding
    chosen = _chosen(candidates, [bisect_right(totals, candidate) for candidate in candidates], most, enough)
    budgets = []
    for limit in chosen:
        within = [one for one in batches if one[0] <= limit]
        sequences, *labels = (max(one[place] for one in within) for place in range(1, len(batches[0])))
        budgets.append(Budget(limit, sequences, max_seqlen, *(max(count, 1) for count in labels)))
    return budgets


def _checked_sizes(sizes: Any) -> list[tuple[int, ...]]:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"sizes: expected a list of tuples, got {type(sizes).__name__}")
    if not sizes:
        raise ValueError("sizes: expected at least one batch, got none")
    batches = []
    for number, size in enumerate(sizes):
        if isinstance(size, str) or not isinstance(size, Sequence):
            raise TypeError(f"sizes[{number}]: expected (tokens, sequences[, labels]), got {type(size).__name__}")
        if len(size) not in (2, 3) or len(size) != len(sizes[0]):
            expected = "2 or 3 numbers, as many as in sizes[0]"
            raise ValueError(f"sizes[{number}]: expected {expected}, got {len(size)}")
        # Labels may be none; tokens and sequences are at least one.
        batches.append(
            tuple(check_count(f"sizes[{number}][{k}]", value, int(k < 2)) for k, value in enumerate(size))
        )  # fmt: skip
    return batches


def _chosen(candidates: list[int], fitting: list[int], most: int, enough: float) -> list[int]:
    """The fewest of some ascending sizes, the largest among them, in which batches take at most `enough` tokens.

    fitting: how many batches fit into each. Where `most` sizes are too few, those that take the fewest tokens.
    """
    # taken[i]: tokens of all batches up to size i, where that is the last of so many sizes; before: the one before it.
    taken: list[float] = [size * count for size, count in zip(candidates, fitting, strict=True)]
    before: list[list[int]] = []
    while taken[-1] > enough and len(before) + 1 < min(most, len(candidates)):
        fewest = list(taken)
        before.append([-1] * len(candidates))
        for i, size in enumerate(candidates):
            for j in range(i):
                tokens = taken[j] + size * (fitting[i] - fitting[j])
                if tokens < fewest[i]:
                    fewest[i], before[-1][i] = tokens, j
        taken = fewest
    chosen, place = [candidates[-1]], len(candidates) - 1
    for places in reversed(before):
        if places[place] >= 0:
            place = places[place]
            chosen.append(candidates[place])
    return chosen[::-1]


class TokenBuffers:
    """Tensors at fixed addresses that hold any batch within a budget, one after another.

    What fills them up counts in no loss. Labels there are -100; as those of sequences may be numbers, they come with an
    entry `loss_mask` (bool [sequences]) that says which count, where neither the example nor `fill` says otherwise.
    start_positions and end_positions lie past every sequence; masked_lm_positions name the last token.

    example: a packed batch (input_ids or inputs_embeds, cu_seqlens, max_seqlen, whatever else the model takes), which
        says what entries there are, their dtypes, and by their sizes whether they belong to tokens, to sequences, to
        questions of num_choices sequences, or to masked_lm_positions. Later batches have the same entries.
    fill: by entry, what unused places hold instead; other entries hold 0.
    batch (dict): the entries as a model takes them; max_seqlen is the budget's.

    Raises: TypeError, ValueError naming the entry; ValueError for labels of tokens or questions that are no integers,
        which no loss here leaves out, unless `fill` names them.
    """

    def __init__(
        self,
        budget: Budget,
        example: Mapping[str, Any],
        device: torch.device | str,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        _check_batch(example)
        self.budget = budget
        self._kinds = {name: _kind(name, value, example) for name, value in example.items() if _is_filled(name)}
        own = fill or {}
        for name, kind in self._kinds.items():
            if "label" in name and kind != "sequence" and name not in own and example[name].dtype not in _INTEGERS:
                raise ValueError(
                    f"batch[{name!r}]: expected integers where labels belong to {kind}s, got "
                    f"{str(example[name].dtype).removeprefix('torch.')}: no loss leaves out what fills the buffers"
                )
        self._fill = {
            "masked_lm_positions": budget.max_tokens - 1,
            **{name: _IGNORED for name in example if "label" in name and example[name].dtype in _INTEGERS},
            **dict.fromkeys(_PLACES, budget.max_seqlen),
            **own,
        }
        # Of sequences they may be numbers, integers too, of which none is left out by its value.
        self._makes_mask = (
            self._kinds.get("labels") == "sequence" and not {_MASK} & example.keys() | {"labels"} & own.keys()
        )
        self._num_choices = example.get("num_choices", 1)
        num_questions = math.ceil(budget.num_slots / self._num_choices)
        num_slots = num_questions * self._num_choices
        rows = {
            "token": budget.max_tokens, "sequence": num_slots, "position": budget.max_labels or 0,
            "question": num_questions,
        }  # fmt: skip
        self.batch: dict[str, Any] = {
            name: torch.empty((rows[kind], *example[name].shape[1:]), dtype=example[name].dtype, device=device)
            for name, kind in self._kinds.items()
        }
        if self._makes_mask:
            self.batch[_MASK] = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.batch["cu_seqlens"] = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.batch |= {name: example[name] for name in ("num_choices",) if name in example}
        self.batch["max_seqlen"] = budget.max_seqlen
        steps = torch.arange(1, num_slots + 1, dtype=torch.int64, device=device)
        self._ends = (steps * budget.max_seqlen).clamp(max=budget.max_tokens).int()  # of filling sequences, from 0

    def fill(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copies a batch in, from whatever device; no device sync. Returns `self.batch`."""
        _check_batch(batch)
        reasons = self.budget.reasons_against(batch)
        if reasons:
            raise ValueError(f"batch: {'; '.join(reasons)}")
        given = {name for name in batch if _is_filled(name)}
        if given != self._kinds.keys():
            raise ValueError(f"batch: expected the entries {sorted(self._kinds)}, got {sorted(given)}")
        num_choices = batch.get("num_choices", 1)
        if num_choices != self._num_choices:
            raise ValueError(
                f"batch['num_choices']: expected {self._num_choices} (the first batch's), got {num_choices}"
            )
        sizes = _sizes(batch)
        # All of it before anything is written: on the device nobody looks at offsets and positions again.
        check_offsets(
            "batch['cu_seqlens']", batch["cu_seqlens"], "batch['max_seqlen']", batch["max_seqlen"], sizes["token"]
        )
        if "masked_lm_positions" in batch:
            check_ids("batch['masked_lm_positions']", batch["masked_lm_positions"], sizes["token"])
        for name, kind in self._kinds.items():
            value, buffer = batch[name], self.batch[name]
            check_shape(f"batch[{name!r}]", value, (sizes[kind], *buffer.shape[1:]))
            if value.dtype != buffer.dtype:
                wanted, got = (str(t.dtype).removeprefix("torch.") for t in (buffer, value))
                raise TypeError(f"batch[{name!r}]: expected dtype {wanted} (the first batch's), got {got}")
        for name, kind in self._kinds.items():
            value, buffer = batch[name], self.batch[name]
            buffer[: sizes[kind]].copy_(value, non_blocking=True)
            buffer[sizes[kind] :].fill_(self._fill.get(name, 0))
        if self._makes_mask:
            self.batch[_MASK][: sizes["sequence"]].fill_(True)
            self.batch[_MASK][sizes["sequence"] :].fill_(False)
        used, cu_seqlens = sizes["sequence"] + 1, self.batch["cu_seqlens"]
        cu_seqlens[:used].copy_(batch["cu_seqlens"], non_blocking=True)
        torch.add(self._ends[: len(cu_seqlens) - used], sizes["token"], out=cu_seqlens[used:])
        cu_seqlens[used:].clamp_(max=self.budget.max_tokens)
        return self.batch


def check_device(name: str, device: torch.device | str) -> None:
    """Raises BackendError, naming the argument, unless the device can capture graphs."""
    if torch.device(device).type != "cuda":
        raise BackendError(f"{name}: expected a CUDA device (graphs are CUDA's), got {device}")
    if not torch.cuda.is_available():
        raise BackendError(f"{name}: CUDA graphs need a CUDA device, and torch sees none")


class CapturedStep:
    """A training step that is captured once per budget and replayed from then on.

    step: called with the batch (a dict at fixed addresses), does all of a step on one device: forward, backward,
        clipping, optimizer, `zero_grad`; returns tensors (in any nesting of dicts, lists and tuples) or None. What it
        does on the host happens while it is captured and never again: no `.item()`, no printing; a learning rate that
        changes is a tensor on the device, and optimizers are capturable (`optim.AdamW` and `Lamb` are). Losses must
        leave out what fills a batch up (see `TokenBuffers`), as those of all models here do. Give masked words by
        masked_lm_positions: to look for them would sync.
    budgets: a batch takes the first that it fits into, by tokens, then by the longest sequence, then by the number of
        sequences. One that fits into none runs as it is, uncaptured; the first time a warning says why.
    num_warmup: calls of every budget that run as they are, on a side stream, before the capture. They are steps like
        any other: each call is exactly one, on its own batch.
    fill: see `TokenBuffers`. Models that `fuse` changed take no loss_mask: {"labels": -100} where they classify.

    Dropout is fresh in every replay: models draw their seed on the device, from PyTorch's generator, whose state CUDA
    graphs advance. Memory of the graphs of all budgets is shared: what a call returns is overwritten by the next.

    Raises:
        TypeError, ValueError: no budget, or (when called) a batch that is none, or has other entries than the first.
        BackendError: there is no CUDA device; a step that cannot be captured.
    """

    def __init__(
        self,
        step: Callable[[dict[str, Any]], Any],
        budgets: Sequence[Budget],
        *,
        device: torch.device | str = "cuda",
        num_warmup: int = 3,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        if not budgets or not all(isinstance(budget, Budget) for budget in budgets):
            raise ValueError(f"budgets: expected at least one Budget, got {budgets!r}")
        if num_warmup < 1:
            raise ValueError(f"num_warmup: expected at least 1 (libraries set themselves up in it), got {num_warmup}")
        check_device("device", device)
        self.step = step
        self.device = torch.device(device)
        self.num_warmup = num_warmup
        self._fill = fill
        self._runs: dict[Budget, _Run | None] = dict.fromkeys(sorted(budgets, key=_work))
        self._pool: Any = None
        # One for warming up and capturing: what autograd and libraries keep for a stream is then there.
        self._stream: Any = None
        self._has_warned = False

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """One step on this batch; what `step` returned, at fixed addresses."""
        _check_batch(batch)
        budget = self._budget_of(batch)
        if budget is None:
            return self.step({
                name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            })  # fmt: skip
        run = self._runs[budget]
        if run is None:
            run = self._runs[budget] = _Run(TokenBuffers(budget, batch, self.device, self._fill))
        inputs = run.buffers.fill(batch)
        if run.graph is None and run.num_calls < self.num_warmup:
            output = self._warm_up(inputs)
            run.num_calls += 1
            return output
        if run.graph is None:
            graph = torch.cuda.CUDAGraph()
            # Of other threads only this one's calls are watched: a loader's may pin memory meanwhile.
            mode = {"pool": self._pool, "stream": self._side_stream(), "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.device(self.device), torch.cuda.graph(graph, **mode):
                    output = self.step(inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise BackendError(f"step: it could not be captured for {budget}: {error}") from error
            # Only now: a step that raised has captured nothing.
            run.graph, run.output, self._pool = graph, output, graph.pool()
        run.graph.replay()
        return run.output

    def _budget_of(self, batch: Mapping[str, Any]) -> Budget | None:
        """The one with the least work that the batch fits into; None, with a warning once, where there is none."""
        reasons = []
        for budget in self._runs:
            against = budget.reasons_against(batch)
            if not against:
                return budget
            reasons.append(f"{budget}: {', '.join(against)}")
        if not self._has_warned:
            self._has_warned = True
            why = "; ".join(reasons)
            warnings.warn(f"batch: it fits into no budget and runs uncaptured: {why}", UserWarning, stacklevel=3)
        return None

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _warm_up(self, inputs: dict[str, Any]) -> Any:
        stream, current = self._side_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            output = self.step(inputs)
        current.wait_stream(stream)
        return output


@dataclass
class _Run:
    """What belongs to one budget."""

    buffers: TokenBuffers
    num_calls: int = 0
    graph: Any = None
    output: Any = None


def _work(budget: Budget) -> tuple[int, ...]:
    """Budgets of less work first: products and LayerNorms go by tokens, attention by the longest sequence as well."""
    return budget.max_tokens, budget.max_seqlen, budget.max_sequences, budget.max_labels or 0


def _is_filled(name: str) -> bool:
    return name not in ("cu_seqlens", "max_seqlen", "num_choices")


def _num_tokens(batch: Mapping[str, Any]) -> int:
    return len(batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"])


def _sizes(batch: Mapping[str, Any]) -> dict[str, int]:
    """How many entries a batch has of each kind."""
    positions = batch.get("masked_lm_positions")
    return {
        "token": _num_tokens(batch),
        "sequence": len(batch["cu_seqlens"]) - 1,
        "position": 0 if positions is None else len(positions),
        "question": (len(batch["cu_seqlens"]) - 1) // batch.get("num_choices", 1),
    }


def _kind(name: str, value: Any, batch: Mapping[str, Any]) -> str:
    """Whether an entry belongs to tokens, sequences or positions."""
    if name in _PER_TOKEN:
        return "token"
    if "masked_lm_positions" in batch and name in ("masked_lm_positions", "labels"):
        return "position"
    sizes = _sizes(batch)
    if "num_choices" in batch and "label" in name:
        return "question"
    kinds = [kind for kind in ("token", "sequence") if value.dim() and len(value) == sizes[kind]]
    if len(kinds) != 1:
        raise ValueError(
            f"batch[{name!r}]: expected an entry for each of {sizes['token']} tokens or {sizes['sequence']} sequences "
            f"(not equally many in the first batch), got shape {list(value.shape)}"
        )
    return kinds[0]


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping, got {type(batch).__name__}")
    if not {"cu_seqlens", "max_seqlen"} <= batch.keys() or not {"input_ids", "inputs_embeds"} & batch.keys():
        raise ValueError(f"batch: expected input_ids or inputs_embeds, cu_seqlens and max_seqlen, got {sorted(batch)}")
    for name, value in batch.items():
        if name not in ("max_seqlen", "num_choices"):
            check_tensor(f"batch[{name!r}]", value)
    if "num_choices" in batch:
        check_count("batch['num_choices']", batch["num_choices"], 1)
    as_length("batch['max_seqlen']", batch["max_seqlen"])
    check_shape("batch['cu_seqlens']", batch["cu_seqlens"], ("B + 1",))
    check_dtype("batch['cu_seqlens']", batch["cu_seqlens"], (torch.int32,))
    if len(batch["cu_seqlens"]) == 0:
        raise ValueError("batch['cu_seqlens']: expected at least one entry (the leading 0), got none")
