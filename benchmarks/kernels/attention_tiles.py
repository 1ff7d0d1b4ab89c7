"""Attention's tiles beside alternatives, and whole heads beside tiles: what the launchers' choices are checked against.

Every group of candidates does the same work in turn, so a GPU's times say which of them should ship. Results decide
nothing by themselves: `bert_fast/triton/attention.py` has the choice, docs/decisions/ the reason.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.timing import Contestant, make_clock, take_turns
from benchmarks.kit.clock import Launch
from benchmarks.kit.crashes import is_usable
from benchmarks.kit.results import reason
from bert_fast.reference.attention import Attention

NUM_HEADS, HEAD_DIM, NUM_TOKENS, SITE = 12, 64, 16384, 9
ROUNDS, COPIES = 12, 2  # inputs of two problems pass any cache
KERNELS = {"forward": "_attention_fwd_kernel", "dq": "_attention_bwd_dq_kernel", "dkdv": "_attention_bwd_dkdv_kernel"}
# (queries, keys, warps, stages) of `Tile`.
TILES = {
    "forward": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3)),
    "dq": ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 4, 3)),
    "dkdv": ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 1), (32, 64, 4, 2), (32, 64, 4, 3), (64, 32, 4, 2)),
}


@dataclass(frozen=True)
class Candidate:
    """One choice of tiles: `which` is one kernel of the tiled ones with that tile, or None as shipped.

    is_whole_head: whether the kernels for whole heads run, where there are such.
    """

    name: str
    is_whole_head: bool = False
    which: str | None = None
    tile: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Group:
    """Candidates for one length; mode: "fwd", or "bwd" for all backward kernels together."""

    what: str
    mode: str
    length: int
    dropout_p: float
    candidates: tuple[Candidate, ...]
    family: ClassVar[str] = "attention"

    @property
    def name(self) -> str:
        """Stable name used in results."""
        return f"{self.what} S{self.length} p{self.dropout_p}"


def _groups() -> Iterator[Group]:
    for dropout_p in (0.1, 0.0):
        for length in (512, 128, 256):
            for which, tiles in TILES.items():
                candidates = tuple(
                    Candidate("x".join(map(str, tile[:2])) + f" {tile[2]} warps {tile[3]} stages", False, which, tile)
                    for tile in tiles
                )
                mode = "fwd" if which == "forward" else "bwd"
                yield Group(which, mode, length, dropout_p, (Candidate("shipped tiles"), *candidates))
        for length in (64, 96, 128):
            for mode in ("fwd", "bwd"):
                yield Group(
                    f"regime {mode}", mode, length, dropout_p,
                    (Candidate("whole head", True), Candidate("tiles"), *_smaller_tiles(mode)),
                )  # fmt: skip


def _smaller_tiles(mode: str) -> Iterator[Candidate]:
    if mode == "fwd":
        yield Candidate("tiles of 64 x 64", False, "forward", (64, 64, 4, 2))


GROUPS = tuple(_groups())  # the most telling first: S = 512 with dropout


@contextmanager
def _choosing(candidate: Candidate) -> Iterator[None]:
    """Within, the launchers take a candidate's tiles."""
    from bert_fast.triton import attention as family
    from bert_fast.triton._attention_tiles import Tile

    shipped = family.launch_config

    def chosen(*arguments: Any) -> Any:
        config = shipped(*arguments)
        return replace(config, **{candidate.which: Tile(*candidate.tile)}) if candidate.which else config

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(family, "launch_config", chosen))
        if not candidate.is_whole_head:
            patches.enter_context(mock.patch.object(family, "short_config", return_value=None))
        yield


def _launches(group: Group, device: torch.device, num_tokens: int, copies: int) -> list[list[Launch]]:
    """For every candidate, launches on each copy of the problem."""
    from bert_fast.ops.packing import Packing
    from bert_fast.triton import attention as family

    count = max(1, num_tokens // group.length)
    found: list[list[Launch]] = [[] for _ in group.candidates]
    for _ in range(copies):
        packing = Packing.full(count, group.length, device)
        shape = (count * group.length, 3, NUM_HEADS, HEAD_DIM)
        q, k, v = torch.randn(shape, device=device).to(torch.bfloat16).unbind(1)
        dout = torch.randn(q.shape, device=device).to(torch.bfloat16)
        seed = torch.tensor([1], device=device) if group.dropout_p else None
        a = Attention(
            q, k, v, packing.cu_seqlens, packing.cu_seqlens, group.length, group.length, HEAD_DIM**-0.5,
            group.dropout_p, seed, coords_q=packing.coords if group.dropout_p else None, coords_k=None, site=SITE,
            causal=False, bias=None, distance_table=None, key_term=False, sequence_order=None,
        )  # fmt: skip
        out, lse = family.attention_fwd(a)
        for launches, candidate in zip(found, group.candidates, strict=True):

            def launch(
                candidate: Candidate = candidate,
                a: Attention = a,
                dout: Tensor = dout,
                out: Tensor = out,
                lse: Tensor = lse,
            ) -> object:
                with _choosing(candidate):
                    if group.mode == "fwd":
                        return family.attention_fwd(a)
                    return family.attention_bwd(a, dout, out, lse, set())

            launches.append(launch)
    return found


def prepare(group: Group, device: torch.device) -> None:
    """Compiles what a group launches, into the compiler's cache on disk, by running it on one sequence."""
    for launches in _launches(group, device, group.length, 1):
        with suppress(Exception):  # `time_group` meets it again, and says so
            launches[0]()


def time_group(
    group: Group, device: torch.device, num_tokens: int = NUM_TOKENS, rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Yields a result for each candidate: what, candidate, length, dropout_p, mode, us and quantiles, or `error`."""
    facts = {"family": group.family, "what": group.what}
    facts |= {"length": group.length, "dropout_p": group.dropout_p, "mode": group.mode}
    contestants: list[Contestant] = []
    for candidate, launches in zip(group.candidates, _launches(group, device, num_tokens, COPIES), strict=True):
        try:
            launches[0]()
            if not is_usable(device):
                raise RuntimeError("the device no longer answers")
        except Exception as failure:  # too much shared memory, say
            yield facts | {"candidate": candidate.name, "error": reason(failure, 300)}
            if not is_usable(device):
                raise  # else all that come after it would have its error
            continue
        contestants.append(Contestant(candidate.name, group.mode, launches, make_clock(device)))
    take_turns(contestants, rounds)
    for contestant in contestants:
        yield facts | {"candidate": contestant.provider, **contestant.times.microseconds()}
