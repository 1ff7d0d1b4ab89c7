"""Which training steps are timed, and who takes part; what `training_steps` does with them."""

from dataclasses import dataclass

import torch

from benchmarks.kit.bert import BY_NAME, VOCAB_SIZE, Size
from benchmarks.models.build import draw_lengths
from benchmarks.models.flash import FLASH
from benchmarks.models.real_lengths import QUANTILES
from benchmarks.registry import Case

FUSED_GRAPHS = "fused_graphs"
PROVIDERS = ("bert_fast", "fused", FUSED_GRAPHS, "sdpa", "eager")
FAMILY_PROVIDERS = ("labelled", "fused", "sdpa")
COMPILED_PROVIDERS = ("bert_fast", "sdpa", "compiled")  # apart: the compiler takes longer than all of the others
GRAPH = "graph"


@dataclass(frozen=True)
class StepCase:
    """One batch. lengths: "full", "even" (any length from 1 to max_len), a name of `real_lengths`, which travels with
    the project, or a file of stored length distributions beside it.

    is_compiled: transformers' model is timed under torch.compile too, which takes a minute to compile it.
    family: of `families.FAMILIES`.
    """

    shape: str
    lengths: str
    max_len: int
    batch_size: int
    is_compiled: bool = False
    vocab_size: int = VOCAB_SIZE
    family: str = "Bert"

    @property
    def name(self) -> str:
        """Stable name used in results."""
        family = "" if self.is_bert else f"{self.family}/"
        return f"step/{family}{self.shape}/{self.lengths}@{self.max_len}/B{self.batch_size}"

    @property
    def size(self) -> Size:
        """Widths of the model."""
        return BY_NAME[self.shape]

    @property
    def is_bert(self) -> bool:
        """Whether there is a model of ours, and a task beside masked words."""
        return self.family == "Bert"

    @property
    def kind(self) -> str:
        """The class of transformers' model."""
        return "BertForPreTraining" if self.is_bert else f"{self.family}ForMaskedLM"

    @property
    def providers(self) -> tuple[str, ...]:
        """Who takes part, ours first."""
        if not self.is_bert:
            return FAMILY_PROVIDERS
        return PROVIDERS if self.lengths == "full" else (*PROVIDERS, FLASH)

    def draw(self) -> list[int]:
        """Lengths of the sequences. FileNotFoundError where those of real texts are not there."""
        if self.lengths == "even":
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(1, self.max_len + 1, (self.batch_size,), generator=generator).tolist()
            return [self.max_len, *drawn[1:]]
        if self.lengths in QUANTILES:
            quantiles, order = QUANTILES[self.lengths], torch.Generator().manual_seed(0)
            places = ((torch.arange(self.batch_size) + 0.5) / self.batch_size * len(quantiles)).long()
            places = places[torch.randperm(self.batch_size, generator=order)]
            return [min(quantiles[place], self.max_len) for place in places.tolist()]
        case = Case(self.shape, self.lengths, self.max_len, "random", "training", self.batch_size)
        return draw_lengths(case, 1)[0]


# The most telling first: should time run out, the others are missing. XLM-RoBERTa's batch is small: the scores of all
# its words, in bf16 and fp32, and their gradients are 17 GB.
CASES = (
    StepCase("large", "full", 512, 32),
    StepCase("base", "full", 128, 256, is_compiled=True),
    StepCase("base", "full", 128, 32),  # as many as one fine-tunes with: the host is the limit
    StepCase("large", "even", 512, 64),
    StepCase("base", "even", 512, 16),
    StepCase("base", "full", 512, 64, is_compiled=True),
    StepCase("base", "squad_windows_512_stride128", 512, 64, is_compiled=True),
    StepCase("base", "squad_windows_512_stride128", 362, 16, vocab_size=250002, family="XLMRoberta"),
    StepCase("base", "full", 512, 32, vocab_size=50265, family="Roberta"),
)
SMALL_CASES = (
    StepCase("tiny", "even", 16, 4, is_compiled=True, vocab_size=100),
    StepCase("tiny", "even", 16, 4, vocab_size=100, family="Roberta"),
)
