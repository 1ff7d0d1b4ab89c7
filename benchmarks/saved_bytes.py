"""Every tensor that one encoder layer keeps for its backward pass, bert_fast's beside Hugging Face's eager layer's.

    python -m benchmarks.saved_bytes [--shape base] [--batch-size 8] [--length 512] [--write]

Counted on the CPU in fp32 with dropout 0.1 everywhere, in the second layer of a whole model: what the first layer or
the embeddings have saved already is theirs. Parameters are left out. --write stores the list as docs/saved_bytes.md.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.bert import BY_NAME, VOCAB_SIZE
from benchmarks.kit.record import ROOT
from benchmarks.kit.saved_bytes import SavedStorage, saved_storages
from benchmarks.models.forward_backward import make_models

GOAL = 0.35  # of what the eager layer keeps, at 512 tokens
PAGE = ROOT / "docs" / "saved_bytes.md"
OF_GPU = "## On a GPU"  # begins what `tools.null_driver.saved_bytes` writes
_MIB = 2**20


def layer_lists(shape: str, batch_size: int, length: int, attention: str = "eager") -> dict[str, list[SavedStorage]]:
    """What the second layer of a model of two keeps, of "bert_fast" and of "transformers"."""
    import transformers

    ours, theirs = make_models(shape, 0.1, 2)
    theirs = transformers.BertModel._from_config(theirs.config, attn_implementation=attention)
    input_ids = torch.randint(1000, VOCAB_SIZE, (batch_size, length))

    def listed(model: Any) -> list[SavedStorage]:
        model.train()
        return saved_storages(model, lambda: model(input_ids=input_ids).last_hidden_state, model.encoder.layer[1])

    return {"bert_fast": listed(ours), "transformers": listed(theirs)}


def bytes_per_layer(shape: str = "base", batch_size: int = 8, length: int = 512) -> dict[str, object]:
    """Bytes that one encoder layer keeps for backward at dropout 0.1, ours and Hugging Face's.

    On the CPU Hugging Face's eager and sdpa numbers agree: PyTorch's fused CPU attention takes no dropout, so sdpa is
    composed of the same products. PyTorch's CPU dropout keeps masks in fp32, where CUDA keeps a byte an element:
    `transformers_eager_byte_masks` is what eager would keep with such masks, the fairer number for GPUs.
    """
    counts: dict[str, int] = {}
    for attention in ("eager", "sdpa"):
        lists = layer_lists(shape, batch_size, length, attention)
        counts |= {"bert_fast": _total(lists["bert_fast"]), f"transformers_{attention}": _total(lists["transformers"])}
    size = BY_NAME[shape]
    num_dropped = batch_size * length * (2 * size.hidden + size.heads * length)  # elements, a layer
    counts["transformers_eager_byte_masks"] = counts["transformers_eager"] - 3 * num_dropped
    shares = {
        f"share_of_{name}": round(counts["bert_fast"] / counts[f"transformers_{name}"], 4)
        for name in ("eager", "eager_byte_masks", "sdpa")
    }
    return {"case": f"saved_bytes_per_layer/{shape}/B{batch_size}/S{length}", **counts, **shares}


def share(lists: dict[str, list[SavedStorage]]) -> float:
    """bert_fast's bytes over those of transformers."""
    ours, theirs = (_total(lists[name]) for name in ("bert_fast", "transformers"))
    return ours / theirs


def render(lists: dict[str, list[SavedStorage]], shape: str, batch_size: int, length: int) -> str:
    """Markdown: the share, what transformers keeps in short, and bert_fast's list."""
    size = BY_NAME[shape]
    lines = [
        f"BERT of {shape}'s size (hidden {size.hidden}, intermediate {size.intermediate}, {size.heads} "
        f"heads), {batch_size} sequences of {length} tokens, fp32, dropout 0.1.",
        "",
        f"**bert_fast keeps {_total(lists['bert_fast']) / _MIB:.1f} MiB a layer, transformers (eager) "
        f"{_total(lists['transformers']) / _MIB:.1f} MiB: {share(lists):.1%}; the goal is at most {GOAL:.0%}.**",
        "",
        f"transformers' MiB by the op that wrote them: {by_op(lists['transformers'])}.",
        "",
        "## bert_fast",
        "",
        *table(lists["bert_fast"]),
    ]
    return "\n".join(lines) + "\n"


def by_op(saved: Sequence[SavedStorage]) -> str:
    """The ops that wrote what is kept and how much each did, most first."""
    totals: Counter[str] = Counter()
    for one in saved:
        totals[one.made_by.split(" ")[0]] += one.nbytes
    return ", ".join(f"`{name}` {nbytes / _MIB:.1f}" for name, nbytes in totals.most_common())


def table(saved: Sequence[SavedStorage]) -> list[str]:
    """Rows of a Markdown table, with a total."""
    lines = ["| written by | saved by | shared with | shape | dtype | MiB |", "| --- | --- | --- | --- | --- | ---: |"]
    for one in saved:
        first, *others = one.saved_by
        shape = " x ".join(map(str, one.shape))
        dtype = str(one.dtype).removeprefix("torch.")
        lines.append(f"| {one.made_by} | {first} | {', '.join(others)} | {shape} | {dtype} | {one.nbytes / _MIB:.3f} |")
    return [*lines, f"| **total** | | | | | **{_total(saved) / _MIB:.3f}** |"]


def page(lists: dict[str, list[SavedStorage]], shape: str, batch_size: int, length: int) -> str:
    """docs/saved_bytes.md."""
    command = f"python -m benchmarks.saved_bytes --shape {shape} --batch-size {batch_size} --length {length} --write"
    return f"""# What a layer keeps for backward

Generated by `{command}`; a test compares the list of bert_fast with a fresh one.

Each row is one piece of memory: the op that wrote it, the op that was the first to save it, and those that save it too
and so share it. Counted in the second layer of a model of two, with saved-tensor hooks and by a walk through autograd's
graph, which agree to the byte. Parameters are left out, and so is what the first layer has saved already: an input that
it saved as its own result is no cost of the second.

{render(lists, shape, batch_size, length)}
On the CPU PyTorch's dropout keeps its masks in fp32, where CUDA keeps a byte an element; the stored figure against such
masks is `share_of_eager_byte_masks` of `python -m benchmarks.run --only saved_bytes`. bert_fast keeps no mask: a seed
and the tokens' coordinates, which all layers share, give it again.
"""


def _total(saved: Sequence[SavedStorage]) -> int:
    return sum(one.nbytes for one in saved)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if the share is beyond the goal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saved_bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=("minilm", "base"), default="base")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--write", action="store_true", help=f"store the list as {Path(*PAGE.parts[-2:])}")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    size = options.shape, options.batch_size, options.length
    lists = layer_lists(*size)
    if options.write:
        _, heading, of_gpu = PAGE.read_text(encoding="utf-8").partition(OF_GPU) if PAGE.exists() else ("", "", "")
        PAGE.write_text(page(lists, *size) + (f"\n{heading}{of_gpu}" if heading else ""), encoding="utf-8")
    print(render(lists, *size), end="")
    return 0 if share(lists) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
