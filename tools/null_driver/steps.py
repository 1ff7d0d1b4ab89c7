"""The steps that are counted and timed: models of BERT's form, far too small to compute much, on one batch.

Sizes are such that the host's work is what takes time, and that kernels are chosen as for real batches: with more than
64 tokens (`triton/_gemm_tiles.py`), half precision uses our matrix products; some sequences are shorter than others.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CLASSES = (
    "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip
PRECISIONS = ("fp32", "bf16", "autocast")
SIZES = dict(vocab_size=100, hidden_size=32, num_attention_heads=1, intermediate_size=64, max_position_embeddings=512)
LENGTHS = (24, 20, 17, 13)
NUM_LABELS, NUM_CHOICES = 3, 2


class Step:
    """One training step of one model in its parts; each may run again once all ran.

    precision: "fp32", "bf16" (parameters as well) or "autocast" to bf16.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], precision: str, make_optimizer: Callable[..., Any]) -> None:
        self.model = model.to(torch.bfloat16) if precision == "bf16" else model
        self.inputs, self.precision = inputs, precision
        self.optimizer = make_optimizer(self.model)
        self._output: Tensor | None = None
        self._upstream: Tensor | None = None
        # Where a GPU's allocator puts a step's gradients again and again, a CPU's need not: these stay where they are.
        self._gradients = [torch.zeros_like(p) for p in self.model.parameters()]

    def forward(self) -> None:
        """Of the loss, or of the hidden states where there is none."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "autocast"):
            self._output = self.model(**self.inputs)[0]

    def backward(self) -> None:
        """Into fresh gradients."""
        assert self._output is not None
        torch.autograd.backward(self._output, self._upstream)

    def optimize(self) -> None:
        """Clipping and the optimizer."""
        self.optimizer()

    def prepare(self, part: str) -> None:
        """What comes before a part and is not counted."""
        if part == "backward":
            for p in self.model.parameters():
                p.grad = None
            assert self._output is not None
            if self._output.ndim and (self._upstream is None or self._upstream.shape != self._output.shape):
                self._upstream = torch.ones_like(self._output)
        elif part == "optimize":
            for p, gradient in zip(self.model.parameters(), self._gradients, strict=True):
                p.grad = None if p.grad is None else gradient

    def run(self, part: str) -> None:
        """One part, after what comes before it."""
        self.prepare(part)
        getattr(self, part)()


PARTS = ("forward", "backward", "optimize")


def _ours(model: Any) -> Callable[[], object]:
    from bert_fast.optim import AdamW

    return AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0).step


def _torchs(model: Any) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def make_step(
    name: str,
    precision: str = "autocast",
    *,
    kind: str = "bert_fast",
    num_layers: int = 2,
    lengths: tuple[int, ...] = LENGTHS,
) -> Step:
    """A step of the class `name`: bert_fast's, or transformers' with SDPA ("transformers") or fused ("fused")."""
    torch.manual_seed(0)
    num_labels = 2 if name == "BertForQuestionAnswering" else NUM_LABELS  # as transformers' wants it
    sizes = SIZES | dict(num_hidden_layers=num_layers, num_labels=num_labels, is_decoder=name == "BertLMHeadModel")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(name, kind, sizes)
    return Step(model.train(), inputs_of(name, lengths), precision, _torchs if kind == "transformers" else _ours)


def _model(name: str, kind: str, sizes: dict[str, Any]) -> Any:
    import bert_fast

    if kind == "bert_fast":
        return getattr(bert_fast, name)(bert_fast.BertConfig(**sizes))
    import transformers

    model = getattr(transformers, name)(transformers.BertConfig(**sizes, attn_implementation="sdpa"))
    return bert_fast.fuse(copy.deepcopy(model)) if kind == "fused" else model


def inputs_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """A padded batch with labels for a class."""
    choices = (NUM_CHOICES,) if name == "BertForMultipleChoice" else ()
    batch, longest = len(lengths), max(lengths)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]  # [B, S]
    words = torch.randint(5, SIZES["vocab_size"], (batch, longest)) * keep
    padded = dict(input_ids=words, attention_mask=keep.long(), token_type_ids=torch.zeros_like(words))
    inputs = {
        one: t.unsqueeze(1).expand(batch, *choices, longest).contiguous() if choices else t for one, t in padded.items()
    }
    if name in ("BertForMaskedLM", "BertForPreTraining"):
        inputs["labels"] = words.masked_fill((torch.arange(longest) % 6 != 1) | ~keep, -100)
    elif name == "BertLMHeadModel":
        inputs["labels"] = words.masked_fill(~keep, -100)
    elif name == "BertForTokenClassification":
        inputs["labels"] = (words % NUM_LABELS).masked_fill(~keep, -100)
    elif name == "BertForQuestionAnswering":
        inputs |= {"start_positions": torch.arange(batch), "end_positions": torch.arange(batch) + 2}
    elif name != "BertModel":
        inputs["labels"] = torch.arange(batch) % 2
    if name == "BertForPreTraining":
        inputs["next_sentence_label"] = torch.arange(batch) % 2
    return inputs
