"""transformers' models with a head on a pooled sequence; since they read little of it, little is computed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bert_fast.huggingface.family import Family
from bert_fast.huggingface.fused import Fused
from bert_fast.huggingface.models import Asked, FusedModel, asked_in_call, first_column, is_fused_model, reads_padding
from bert_fast.huggingface.reasons import has_noticing_hooks
from bert_fast.modules.call import first_rows


class FusedPooledHead(Fused):
    """A head on the pooled sequence: of the last layer, only the first tokens' rows are computed."""

    inner: Any
    rows: Any = staticmethod(first_rows)
    reads: Any = None  # as of `Asked`

    @classmethod
    def forward_for(cls, original: Any, family: Family) -> Callable[..., Any]:
        """As transformers' own."""
        theirs = original.forward

        @functools.wraps(theirs)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_replaced():
                return original.forward(self, *args, **kwargs)
            inner = model = self.inner
            is_whole = not is_fused_model(inner) or has_noticing_hooks(inner)
            if is_whole and not isinstance(inner, FusedModel):  # something stands around it, or it is none
                model = next((module for module in inner.modules() if isinstance(module, FusedModel)), None)
            with asked_in_call.set(Asked(model, self.rows, is_whole, self.reads)):
                return theirs(self, *args, **kwargs)

        return forward


class FusedForSequenceClassification(FusedPooledHead):
    """Classes of texts, from pooled sequences."""


class FusedFirstTokenHead(FusedPooledHead):
    """A head that reads the hidden state of the first token."""

    rows = staticmethod(first_column)


class FusedFirstTokenClassification(FusedFirstTokenHead, FusedForSequenceClassification):
    """Classes of texts, from the hidden state of the first token."""


def _last(columns: Tensor) -> Tensor:
    return columns[..., -1]


def _all(columns: Tensor) -> Tensor:
    return columns


class FusedSummaryHead(FusedPooledHead):
    """A head on a summary of hidden states, which the configuration chooses.

    It is of the first token, or of columns that transformers takes whether they are padding or not: the last one or
    all. Where such a column is padding, the whole call is transformers' own.
    """

    sequence_summary: Any
    rows = property(lambda self: first_column if self.sequence_summary.summary_type == "first" else None)
    reads = property(lambda self: {"first": None, "mean": _all}.get(self.sequence_summary.summary_type, _last))

    def reasons_of_head(self, inputs: Mapping[str, Any]) -> list[str]:
        """Why this head needs transformers' code."""
        return [] if self.reads is None else reads_padding(self.reads, inputs)
