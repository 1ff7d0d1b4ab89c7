"""The stack of layers, and which of them run again in backward."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_fast.modules.call import Call
from bert_fast.modules.flat_layer import PackedFlatLayer
from bert_fast.modules.fusable import shown_padded
from bert_fast.modules.layer import BertLayer, PackedLayer
from bert_fast.modules.whole_layer import Around, run_whole, run_whole_stack

# Masks follow from the seed, so no generator state needs saving.
CHECKPOINT_ARGUMENTS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


_WHOLE = {PackedLayer.forward_packed, PackedFlatLayer.forward_packed}  # which ask `run_whole` first, and may be skipped


class PackedEncoder:
    """The computation of BertEncoder, for any module that holds layers.

    checkpoint_every: layers 0, n, 2n, ... keep only their input for backward, and run again there; 0: none does.
    """

    layer: Iterable[Any]
    training: bool
    checkpoint_every = 0
    checkpoint_arguments = CHECKPOINT_ARGUMENTS
    # Replays the layers where it can: (encoder, x, call) -> y or None, as `bert_fast.graphs.EncoderGraphs`.
    graphs: Callable[["PackedEncoder", Tensor, Call], Tensor | None] | None = None

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H], memory [Tm, H] or None, to [T, H], or [M, H] where the call names rows."""
        if self.graphs is not None and memory is None:
            y = self.graphs(self, x, call)
            if y is not None:
                return y
        return self.run_layers(x, memory, call=call)

    def run_layers(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """`forward_packed`, each layer called."""
        if call.shows_padded:
            with shown_padded(call.packing):
                return self.run_layers(x, memory, call=replace(call, shows_padded=False))
        layers = list(self.layer)
        # What a layer writes down in passing, it must not write twice.
        runs_again = self.training and self.checkpoint_every and call.cache is None and call.attentions is None
        inner = call if call.rows is None else call.with_rows(None)
        if memory is None and layers and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y = self._run_together(layers, x, [*[inner] * (len(layers) - 1), call])
            if y is not None:
                return y
        around: Around | None = None
        for index, layer in enumerate(layers):
            x = call.shown(x)
            layer_call = call if index == len(layers) - 1 else inner
            y = None
            if memory is None and not runs_again and getattr(type(layer), "forward_packed", None) in _WHOLE:
                if around is None or around.call is not layer_call:
                    around = Around(x, layer_call, around)
                y = run_whole(layer, x, layer_call, is_called=False, around=around)
            if y is not None:
                x = y
                continue
            around = None  # whatever runs now may change what was asked
            if runs_again and index % self.checkpoint_every == 0:
                run = functools.partial(layer, call=layer_call)
                x = checkpoint(run, x, memory, **self.checkpoint_arguments)
            else:
                x = layer(x, memory, call=layer_call)
        x = call.shown(x)
        return x if layers else call.of_rows(x)

    def _run_together(self, layers: Sequence[Any], x: Tensor, calls: Sequence[Call]) -> Tensor | None:
        """The output of all layers, none of which is called; None where they are to be."""
        if all(getattr(type(layer), "forward_packed", None) in _WHOLE for layer in layers):
            return run_whole_stack(layers, x, calls)
        return None


class BertEncoder(PackedEncoder, nn.Module):
    """The stack of layers; parameters named as in Hugging Face's BertEncoder."""

    forward = PackedEncoder.forward_packed

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, index) for index in range(config.num_hidden_layers))
