"""Embeddings whose first entries are embeddings themselves."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_count, check_floating
from bert_fast.losses._rows import check_factor
from bert_fast.reference.precision import wide

__all__ = ["matryoshka"]


def matryoshka(
    loss: Callable[..., Tensor], *embeddings: Tensor, dims: Sequence[int], weights: Sequence[float] | None = None
) -> Tensor:
    """Sum over dims d of weight * loss of the first d entries of all embeddings, each scaled to length 1.

        losses.matryoshka(losses.in_batch_negatives, queries, documents, dims=[768, 256, 64])

    loss: of as many embeddings, returns a Tensor []. embeddings (Tensors [..., D], floating): at least one.
    dims: each from 1 to D, each once. weights: one for each; None: 1.
    Returns: Tensor []. Raises: TypeError, ValueError naming the argument.
    Source: Kusupati et al. 2022 (arXiv:2205.13147), equation 1.
    """
    if not callable(loss):
        raise TypeError(f"loss: expected a function of embeddings, got {type(loss).__name__}")
    if not embeddings:
        raise ValueError("embeddings: expected at least one Tensor, got none")
    for place, one in enumerate(embeddings):
        check_floating(f"embeddings[{place}]", one)
    most = min(one.shape[-1] if one.dim() else 0 for one in embeddings)
    sizes = [check_count(f"dims[{place}]", size, 1) for place, size in enumerate(_listed("dims", dims))]
    if not sizes or len(set(sizes)) < len(sizes) or max(sizes) > most:
        raise ValueError(f"dims: expected different numbers from 1 to {most} (of the embeddings), got {sizes}")
    factors = [1.0] * len(sizes) if weights is None else _listed("weights", weights)
    if len(factors) != len(sizes):
        raise ValueError(f"weights: expected {len(sizes)} numbers, one for each of dims, got {len(factors)}")
    total: Tensor | None = None
    for place, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        factor = check_factor(f"weights[{place}]", factor, is_positive=False)
        part = factor * loss(*(F.normalize(wide(one)[..., :size], dim=-1) for one in embeddings))
        total = part if total is None else total + part
    assert total is not None
    return total


def _listed(name: str, values: Sequence[float]) -> list[float]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a list of numbers, got {type(values).__name__}")
    return list(values)
