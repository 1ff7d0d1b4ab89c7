"""What a layer of BERT-base keeps for backward in bf16: on a GPU, over the driver that runs nothing.

docs/saved_bytes.md has the list, of eight sequences of 512 tokens. Taken from the node of the whole-layer op, which
saved-tensor hooks, by which `benchmarks.kit.saved_bytes` counts, would take apart.
"""

from typing import Any

import torch
from torch import Tensor


def layer_list(batch_size: int, length: int) -> list[tuple[str, Tensor]]:
    """Names and tensors that the op saves in the second layer of two, dropout 0.1.

    Without its input, the first layer's output, and without parameters and what layers share. On the CPU where no
    driver was started.
    """
    from benchmarks.models.forward_backward import make_models
    from bert_fast.reference.encoder_layer import Saved

    model = make_models("base", 0.1, 2)[0].to(torch.bfloat16).train()
    input_ids = torch.randint(1000, 20_000, (batch_size, length))
    node: Any = model(input_ids=input_ids).last_hidden_state.grad_fn
    while "encoder_layer" not in type(node).__name__:
        node = node.next_functions[0][0]
    names = ("y", *Saved._fields)
    saved = zip(names, node.saved_tensors[: len(names)], strict=True)
    return [(name, tensor) for name, tensor in saved if tensor is not None]
