"""Self-attention of one BERT layer on packed tokens; parameters named as in Hugging Face's BertAttention.

`query`, `key` and `value` are ordinary linear layers whose weights lie side by side in one storage, as do their biases,
so that one product makes all three (`docs/decisions/0010-qkv-storage.md`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.modules.plain_linear import is_plain, product_and_bias
from bert_fast.ops.attention_qkv import attention_qkv
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.packing import Packing
from bert_fast.ops.qkv_projection import qkv_projection
from bert_fast.storage import join_storage

__all__ = ["BertAttention", "BertSelfAttention", "BertSelfOutput"]


class BertSelfAttention(nn.Module):
    """dropout(softmax(q k^T / sqrt(D))) v with q, k, v projected from one input.

    pruned_heads: those removed, by their numbers in a layer that has all; those of the configuration are never made.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.pruned_heads = frozenset((getattr(config, "pruned_heads", None) or {}).get(layer, ()))
        self.num_heads = config.num_attention_heads - len(self.pruned_heads)
        if self.num_heads < 1:
            raise ValueError(
                f"config.pruned_heads: expected at least one head of layer {layer} to stay, "
                f"got all {config.num_attention_heads}"
            )
        self.head_dim = config.hidden_size // config.num_attention_heads
        width = self.num_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, width)
        self.key = nn.Linear(config.hidden_size, width)
        self.value = nn.Linear(config.hidden_size, width)
        self.dropout_p = config.attention_probs_dropout_prob
        self.site = dropout_site(DropoutSite.ATTENTION_PROBS, layer)
        self.register_load_state_dict_post_hook(_join_after_loading)
        self._join_storage()

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """x [T, H] to the heads' outputs side by side, [T, A * D]."""
        qkv = self._project(x).unflatten(1, (3, self.num_heads, self.head_dim))  # [T, 3, A, D]
        out = attention_qkv(
            qkv, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen,
            dropout_p=self.dropout_p if self.training else 0.0, seed=seed, coords=packing.coords, site=self.site,
            sequence_order=packing.order,
        )  # fmt: skip
        return out.flatten(1)

    def _project(self, x: Tensor) -> Tensor:
        """[T, H] to [T, 3 * A * D]: query, key and value of a token side by side."""
        projections = (self.query, self.key, self.value)
        if all(is_plain(projection) for projection in projections):
            parameters = (p for projection in projections for p in (projection.weight, projection.bias))
            return qkv_projection(x, *parameters)
        return torch.cat([projection(x) for projection in projections], dim=1)

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
            _keep(projection, index, 0)
        self.pruned_heads, self.num_heads = removed, num_all - len(removed)
        self._join_storage()
        return index

    def _join_storage(self) -> None:
        """Puts the three weights side by side, and the biases; what moves them apart is followed by a call of this."""
        projections = (self.query, self.key, self.value)
        join_storage(*(getattr(projection, "weight", None) for projection in projections))
        join_storage(*(getattr(projection, "bias", None) for projection in projections))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BertSelfAttention":
        # .to(), .half(), .cuda(), to_empty(), share_memory(): each parameter on its own.
        super()._apply(fn, recurse)
        self._join_storage()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies by copy.deepcopy and pickle: of each parameter on its own.
        super().__setstate__(state)
        self._join_storage()


def _join_after_loading(module: BertSelfAttention, _incompatible_keys: Any) -> None:
    module._join_storage()  # load_state_dict(assign=True) puts other tensors in the parameters' place


def _keep(linear: nn.Linear, index: Tensor, dim: int) -> None:
    """Leaves a linear layer those rows (dim 0) or columns (dim 1) of its weight, and the biases of its rows."""
    index = index.to(linear.weight.device)
    names = ("weight", "bias") if dim == 0 else ("weight",)
    for name in names:
        parameter = getattr(linear, name)
        if parameter is not None:
            kept = parameter.detach().index_select(dim, index)
            setattr(linear, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    linear.out_features, linear.in_features = linear.weight.shape


class BertSelfOutput(nn.Module):
    """LN(residual + dropout(dense(x))): what closes the first half of a layer."""

    def __init__(self, in_features: int, config: Any, layer: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = DropoutAddLayerNorm(config.hidden_size, config.layer_norm_eps, config.hidden_dropout_prob)
        self.site = dropout_site(DropoutSite.ATTENTION_OUTPUT, layer)

    def forward(self, x: Tensor, residual: Tensor, coords: Tensor, seed: Tensor | None) -> Tensor:
        """x [T, in_features], residual [T, H] to [T, H]; the dense layer's bias is added by the fused op."""
        product, bias = product_and_bias(x, self.dense)
        return self.LayerNorm(product, residual, x_bias=bias, seed=seed, coords=coords, site=self.site)


class BertAttention(nn.Module):
    """Self-attention and the sub-layer that closes it."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layer)
        self.output = BertSelfOutput(self.self.query.out_features, config, layer)

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """[T, H] to [T, H]."""
        return self.output(self.self(x, packing, seed), x, packing.coords, seed)

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Removes heads, see `BertSelfAttention.prune_heads`, and the columns of the output's weight that read them."""
        _keep(self.output.dense, self.self.prune_heads(heads), 1)
