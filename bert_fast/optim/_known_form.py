"""Lists of a step whose form was checked before: read anew at every step, and checked in one call.

No tensor is kept, so no list can be stale: parameters, gradients and state are read from where they are now. What is
kept is their form (class, dtype, device, layout, sizes, strides), which was found to fit; whatever has another form,
or is missing, is left to the full checks.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.ops._optimizer_lists import lists_fit
from bert_fast.reference.optimizer import StepLists
from bert_fast.remembered import guard_of

_PLAIN = frozenset({Tensor, nn.Parameter})
_grad = operator.attrgetter("grad")
_moments = operator.itemgetter("exp_avg", "exp_avg_sq", "step")
_with_master = operator.itemgetter("exp_avg", "exp_avg_sq", "step", "master_param")


class KnownForm:
    """The form of the lists of one group: of its parameters that have a gradient."""

    def __init__(self, lists: StepLists, master_weights: bool) -> None:
        self._count = len(lists.params)
        self._has_masters = bool(lists.master_params)
        self._master_weights = master_weights
        self._guard = guard_of([tensor for column in lists for tensor in column])
        self._first = 0  # place of the group's first parameter in the optimizer's state

    def lists_of(
        self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]], master_weights: bool
    ) -> StepLists | None:
        """The lists as they are now; None where anything has another form, is missing, or is there in addition."""
        if master_weights is not self._master_weights or torch.compiler.is_compiling():
            return None
        try:
            grads = list(map(_grad, params))
            if len(grads) != self._count:  # some have none, and are passed over
                params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
                if len(params) != self._count:
                    return None
            states = self._states(params, state)
            if states is None or set(map(len, states)) != {4 if self._has_masters else 3}:
                return None
            columns = list(map(list, zip(*map(_with_master if self._has_masters else _moments, states), strict=True)))
            exp_avgs, exp_avg_sqs, steps, *masters = columns
            lists = StepLists(list(params), grads, exp_avgs, exp_avg_sqs, steps, masters[0] if masters else [])
            fits = self._guard(*lists[0], *lists[1], *lists[2], *lists[3], *lists[4], *lists[5])
        except (KeyError, TypeError, AttributeError):  # an entry is missing, or is no tensor
            return None
        return lists if fits else None

    def _states(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The states of the parameters; without hashing them where they stand in the same order, as they usually do."""
        end = self._first + self._count
        keys = list(islice(state, self._first, end))
        if len(keys) == self._count and all(map(operator.is_, keys, params)):
            return list(islice(state.values(), self._first, end))
        places = {id(p): place for place, p in enumerate(state)}
        self._first = places.get(id(params[0]), 0)
        return [state[p] for p in params] if all(id(p) in places for p in params) else None


def known_form(lists: StepLists, master_weights: bool) -> KnownForm | None:
    """The form of lists that fit and are contiguous throughout; None for others, which are checked at each step."""
    if torch.compiler.is_compiling() or not lists_fit(lists):
        return None
    tensors = [tensor for column in lists for tensor in column]
    plain = _PLAIN.issuperset(map(type, tensors))
    return KnownForm(lists, master_weights) if plain and all(map(Tensor.is_contiguous, tensors)) else None
