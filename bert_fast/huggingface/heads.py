"""transformers' models with a head on a pooled sequence; since they read little of it, little is computed."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from bert_fast.huggingface.family import Family
from bert_fast.huggingface.fused import Fused
from bert_fast.huggingface.models import asking, first_column, is_fused_model
from bert_fast.huggingface.reasons import is_watched
from bert_fast.modules.call import first_rows

__all__ = [
    "FusedFirstTokenClassification",
    "FusedFirstTokenHead",
    "FusedForSequenceClassification",
    "FusedPooledHead",
    "FusedSummaryHead",
]


class FusedPooledHead(Fused):
    """A head on the pooled sequence: of the last layer, only the first tokens' rows are computed."""

    inner: Any
    rows: Any = staticmethod(first_rows)

    @classmethod
    def forward_for(cls, original: Any, family: Family) -> Callable[..., Any]:
        """As transformers' own."""
        theirs = original.forward

        @functools.wraps(theirs)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Nobody else looks at what the model returns.
            inner = self.inner
            if not is_fused_model(inner) or is_watched(inner) or self.is_replaced():
                return original.forward(self, *args, **kwargs)
            if family.passes_arguments:
                return theirs(self, *args, **kwargs, rows=self.rows)
            if torch.compiler.is_compiling():  # which cannot follow context variables
                return theirs(self, *args, **kwargs)
            with asking(inner, self.rows):
                return theirs(self, *args, **kwargs)

        return forward


class FusedForSequenceClassification(FusedPooledHead):
    """Classes of texts, from pooled sequences."""


class FusedFirstTokenHead(FusedPooledHead):
    """A head that reads the hidden state of the first token."""

    rows = staticmethod(first_column)


class FusedFirstTokenClassification(FusedFirstTokenHead, FusedForSequenceClassification):
    """Classes of texts, from the hidden state of the first token."""


class FusedSummaryHead(FusedPooledHead):
    """A head on a summary of hidden states, which the configuration chooses: the first token's, or others."""

    sequence_summary: Any
    rows = property(lambda self: first_column if self.sequence_summary.summary_type == "first" else None)
