"""The computation in fewer modules: layers of DistilBERT (Sanh et al. 2019), attention of MPNet (Song et al. 2020).

What BERT keeps in modules for itself, each with its linear layer, dropout and LayerNorm, lies here in others; nothing
is dropped between attention and its LayerNorm.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bert_fast.modules.attention import PackedSelfAttention, PackedSelfOutput
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import runs_hooks
from bert_fast.modules.mlp import PackedIntermediate, PackedOutput
from bert_fast.modules.whole_layer import Pieces, are_own, run_whole


class _Closing(PackedSelfOutput):
    dropout_p, site, training = 0.0, 0, False

    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm) -> None:
        self.dense, self.LayerNorm = dense, norm


class _Widening(PackedIntermediate):
    _forward_hooks = _forward_pre_hooks = _backward_hooks = _backward_pre_hooks = ()  # it is no module

    def __init__(self, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> None:
        self.dense, self.hidden_act = dense, hidden_act

    __call__ = PackedIntermediate.forward_packed


class _Narrowing(PackedOutput):
    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm, feed_forward: Any) -> None:
        self.dense, self.LayerNorm = dense, norm
        self.dropout_p, self.site, self.training = feed_forward.dropout_p, feed_forward.site, feed_forward.training


class PackedJoinedAttention(PackedSelfOutput):
    """Attention and what closes it in one module: `heads`, a `PackedSelfAttention`, then `dense` and LayerNorm."""

    heads: Any

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H] to [T, H], or [M, H] where the call names rows."""
        return super().forward_packed(self.heads(x, call=call), call.of_rows(x), call=call)


class PackedFlatLayer:
    """x -> LN(x + attention(x)) -> LN(. + MLP(.)), for any module that has its parts under these names.

    heads: a `PackedSelfAttention`, which `attention_dense` follows. feed_forward: what holds `up` and `down`, and has
    hidden_act, dropout_p and site.
    """

    heads: Any
    attention_dense: nn.Linear
    attention_norm: nn.LayerNorm
    feed_forward: Any
    up: nn.Linear
    down: nn.Linear
    norm: nn.LayerNorm
    chunk_size_feed_forward = 0

    def pieces(self) -> Pieces | None:
        """See `whole_layer`."""
        heads, feed_forward = self.heads, self.feed_forward
        if (
            not are_own((heads,), (PackedSelfAttention,))
            or runs_hooks(feed_forward)
            or "forward" in feed_forward.__dict__
        ):
            return None
        closing, up, down = self._parts()
        layers = (
            heads.query, heads.key, heads.value, closing.dense, closing.LayerNorm, up.dense, down.dense, down.LayerNorm,
        )  # fmt: skip
        return heads, closing, up, down, layers

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H] to [T, H], or [M, H] where the call names rows; there is no attention to a memory."""
        y = run_whole(self, x, call)
        if y is not None:
            return y
        closing, up, down = self._parts()
        x = closing.forward_packed(self.heads(x, call=call), call.of_rows(x), call=call)
        return down.forward_packed(x, up, call=call)

    def _parts(self) -> tuple[_Closing, _Widening, _Narrowing]:
        feed_forward = self.feed_forward
        return (
            _Closing(self.attention_dense, self.attention_norm),
            _Widening(self.up, feed_forward.hidden_act),
            _Narrowing(self.down, self.norm, feed_forward),
        )
