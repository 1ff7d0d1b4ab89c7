"""Query, key and value of one attention: ordinary linear layers whose weights lie side by side in memory.

So do their biases, and one product makes all three (`docs/decisions/0010-qkv-storage.md`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.fusable import called, is_plain, joined_products, weight_and_bias
from bert_fast.ops.linear import linear
from bert_fast.ops.qkv_projection import qkv_projection
from bert_fast.storage import join_memory, separate_memory


class JoinedMemory:
    """Linear layers of one module whose weights lie side by side in memory, and so do their biases.

    What moves parameters apart is followed by `_join_memory`: here `_apply` and unpickling, and, where a module has
    registered it, `join_after_loading`.
    """

    _joined: Callable[[], tuple[nn.Linear, ...]]  # the layers, in their order; none: nothing is joined

    def _join_memory(self) -> None:
        """Puts the weights side by side, and the biases."""
        for parameters in self._weights_and_biases():
            join_memory(*parameters)

    def _separate_memory(self) -> None:
        """Undoes `_join_memory`."""
        for parameters in self._weights_and_biases():
            separate_memory(*parameters)

    def _weights_and_biases(self) -> list[list[Any]]:
        layers = self._joined()
        return [[getattr(layer, name, None) for layer in layers] for name in ("weight", "bias")] if layers else []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # .to(), .half(), .cuda(), to_empty(), share_memory(): each parameter on its own.
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._join_memory()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies by copy.deepcopy and pickle: of each parameter on its own.
        super().__setstate__(state)  # type: ignore[misc]
        self._join_memory()


class JoinedProjections(JoinedMemory):
    """The products with `query`, `key` and `value`, for any module that has them."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    num_heads: int
    head_dim: int

    def _project(self, x: Tensor) -> Tensor:
        """x [T, H] to [T, 3 * A * D]: query, key and value of a token side by side."""
        query, key, value = self.query, self.key, self.value
        if is_plain(query) and is_plain(key) and is_plain(value):
            return qkv_projection(x, *weight_and_bias(query), *weight_and_bias(key), *weight_and_bias(value))
        return joined_products(x, query, key, value)

    def _query(self, x: Tensor) -> Tensor:
        """x [M, H] to q [M, A, D], where only a few tokens ask or the keys are those of others."""
        query = self.query
        q = linear(x, *weight_and_bias(query)) if is_plain(query) else called(query, x)
        return q.unflatten(1, (self.num_heads, self.head_dim))

    def _key_and_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [Tk, H] to k and v [Tk, A, D], by one product."""
        kv = joined_products(x, self.key, self.value).unflatten(1, (2, self.num_heads, self.head_dim))
        k, v = kv.unbind(1)
        return k, v

    def _joined(self) -> tuple[nn.Linear, ...]:
        return self.query, self.key, self.value


def join_after_loading(module: Any, _incompatible_keys: Any) -> None:
    """A hook for `register_load_state_dict_post_hook`: load_state_dict(assign=True) puts other tensors in place."""
    module._join_memory()


class Projections(JoinedProjections, nn.Module):
    """The parameters: query, key and value, of the heads that config.pruned_heads leaves a layer.

    pruned_heads: those removed, by their numbers in a layer that has all; those of the configuration are never made.
    """

    def __init__(self, config: Any, pruned_heads: Iterable[int] = ()) -> None:
        super().__init__()
        self.pruned_heads = frozenset(pruned_heads)
        self.num_heads = config.num_attention_heads - len(self.pruned_heads)
        self.head_dim = config.hidden_size // config.num_attention_heads
        width = self.num_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, width)
        self.key = nn.Linear(config.hidden_size, width)
        self.value = nn.Linear(config.hidden_size, width)
        self.dropout_p = config.attention_probs_dropout_prob
        self.register_load_state_dict_post_hook(join_after_loading)
        self._join_memory()

    def prune_heads(self, heads: Iterable[int]) -> Tensor:
        """Removes heads, counted as in a layer that has all; those removed before may be among them.

        The linear layers stay, with new and smaller parameters: optimizers must be made after it.
        Returns: which columns of the output stay (Tensor [A * D left], int64).
        Raises: ValueError for a head that never was, or where none would be left; nothing is changed then.
        """
        num_all = self.num_heads + len(self.pruned_heads)
        removed = self.pruned_heads | frozenset(heads)
        if not all(0 <= head < num_all for head in removed):
            raise ValueError(f"heads: expected numbers of heads in [0, {num_all}), got {sorted(removed)}")
        if len(removed) == num_all:
            raise ValueError(f"heads: expected at least one of {num_all} heads to stay, got {sorted(removed)}")
        present = [head for head in range(num_all) if head not in self.pruned_heads]
        stays = torch.tensor([head not in removed for head in present]).repeat_interleave(self.head_dim)
        index = stays.nonzero().squeeze(1)
        for projection in (self.query, self.key, self.value):
            keep_features(projection, index, 0)
        self.pruned_heads, self.num_heads = removed, num_all - len(removed)
        self._join_memory()
        return index


def keep_features(linear: nn.Linear, index: Tensor, dim: int) -> None:
    """Leaves a linear layer those rows (dim 0) or columns (dim 1) of its weight, and the biases of its rows."""
    index = index.to(linear.weight.device)
    names = ("weight", "bias") if dim == 0 else ("weight",)
    for name in names:
        parameter = getattr(linear, name)
        if parameter is not None:
            kept = parameter.detach().index_select(dim, index)
            setattr(linear, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    linear.out_features, linear.in_features = linear.weight.shape
