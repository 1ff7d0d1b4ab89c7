"""THE list of benchmark cases: whole models, declared here, kernels, declared by their families, and tokenizers."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.aot.case import AotCase
from benchmarks.families import family_names
from benchmarks.kernels.case import KernelCase, Use


@dataclass(frozen=True)
class Case:
    """One whole-model comparison with Hugging Face's model without a head (SDPA) on the same padded batches.

    lengths: a file of ../shared/data/length_distributions without its ending, or "full" (all `max_len`).
    order: "random" (batches as they come) or "sorted" (batches of neighbours after sorting by length).
    mode: "inference" (no gradients) or "training" (dropout 0.1, forward and backward; no optimizer, which costs both
        sides the same).
    is_fused: whether our side is Hugging Face's model after `bert_fast.fuse`, not our own.
    family: of `models.families.FAMILIES`; others than BERT are fused.
    """

    shape: str
    lengths: str
    max_len: int
    order: str
    mode: str
    batch_size: int = 32
    is_fused: bool = False
    family: str = "Bert"

    @property
    def name(self) -> str:
        """Stable name used in results and on the command line."""
        group = "fuse/" if self.is_fused else ""
        if self.family != "Bert":
            group = f"families/{self.family}/"
        return f"{group}{self.shape}/{self.lengths}@{self.max_len}/{self.order}/{self.mode}"


_LENGTHS = (
    ("single_books", 512, "random"),
    ("squad_windows_384_stride128", 384, "random"),
    ("single_books", 512, "sorted"),
    ("squad_windows_384_stride128", 384, "sorted"),
    ("full", 128, "random"),
)

CASES = tuple(
    Case(shape, lengths, max_len, order, mode)
    for shape in ("minilm", "base")
    for lengths, max_len, order in _LENGTHS
    for mode in ("inference", "training")
)

# Hugging Face's own model, fused, beside itself untouched; on the CPU. Smaller batches: ratios change little with them.
FUSED_CASES = tuple(
    Case(shape, lengths, max_len, order, mode, batch_size, is_fused=True)
    for shape, batch_size in (("minilm", 16), ("base", 8))
    for lengths, max_len, order in (*_LENGTHS[:1], *_LENGTHS[2:3], *_LENGTHS[-1:])
    for mode in ("inference", "training")
)

# The same of other families. DistilBERT has half of BERT-base's layers.
FAMILY_CASES = tuple(
    Case(shape, lengths, max_len, order, mode, batch_size=8, is_fused=True, family=family)
    for family, shape in (
        ("Roberta", "base"), ("XLMRoberta", "base"), ("Electra", "base"), ("DistilBert", "base6"), ("MPNet", "base"),
        ("NomicBert", "base"), ("Gte", "base"), ("JinaEmbeddingsV3", "base"), ("DebertaV2", "base"),
    )
    for lengths, max_len, order in (_LENGTHS[0], _LENGTHS[-1])
    for mode in ("inference", "training")
)  # fmt: skip


def kernel_cases(uses: Use | str, families: Iterable[str] | None = None) -> list[KernelCase]:
    """The kernel cases for a use, or for any of several, of all families or of some.

    uses: a flag, or the name of one in lower case. families: a dotted name is a module from elsewhere, for tests.
    """
    wanted = Use[uses.upper()] if isinstance(uses, str) else uses
    return [case for _, module in _modules(families) for case in module.cases() if case.uses & wanted]


def aot_cases(families: Iterable[str] | None = None) -> Iterator[tuple[str, AotCase]]:
    """(family, case) of what is compiled ahead of time, of all families or of some."""
    for name, module in _modules(families):
        if hasattr(module, "aot_cases"):  # else other families have its kernels
            for case in module.aot_cases():
                yield name, case


def _modules(families: Iterable[str] | None) -> Iterator[tuple[str, Any]]:
    for name in family_names() if families is None else families:
        yield name, importlib.import_module(name if "." in name else f"benchmarks.families.{name}")
