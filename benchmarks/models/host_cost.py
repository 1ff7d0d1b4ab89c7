"""What a layer costs the host where there is next to nothing to compute: one token, hidden 16, one thread."""

import copy
import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["one_token"]

NUM_LAYERS = 12


def one_token(rounds: int, mode: str = "inference") -> dict[str, object]:
    """Microseconds of the processor a layer, of our BertModel, of a fused one and of transformers', in turn.

    mode: "inference" (no gradients) or "training" (dropout 0.1, forward and backward).
    """
    import transformers

    import bert_fast

    arguments = dict(
        vocab_size=100, hidden_size=16, num_hidden_layers=NUM_LAYERS, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    theirs = transformers.BertModel(transformers.BertConfig(**arguments, attn_implementation="sdpa"))
    models: dict[str, torch.nn.Module] = {
        "bert_fast": bert_fast.BertModel(bert_fast.BertConfig(**arguments)),
        "fused": bert_fast.fuse(copy.deepcopy(theirs)),
        "transformers": theirs,
    }
    calls = {name: _call(model.train(mode == "training"), mode) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for round_index in range(10 * rounds + 5):
            for name, call in calls.items():
                start = time.process_time_ns()  # of this process: other processes' turns do not count
                for _ in range(5):
                    call()
                if round_index >= 5:
                    times[name].append((time.process_time_ns() - start) / 5e3 / NUM_LAYERS)
    finally:
        torch.set_num_threads(num_threads)
    medians = {f"{name}_us_per_layer": round(statistics.median(values), 1) for name, values in times.items()}
    ratios = (theirs / ours for ours, theirs in zip(times["bert_fast"], times["transformers"], strict=True))
    return {"case": f"one_token/{mode}", **medians, "ratio": round(statistics.median(ratios), 3)}


def _call(model: torch.nn.Module, mode: str) -> Callable[[], None]:
    input_ids = torch.tensor([[5]])

    def inference() -> None:
        with torch.no_grad():
            model(input_ids=input_ids)

    def training() -> None:
        model(input_ids=input_ids).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    return training if mode == "training" else inference
