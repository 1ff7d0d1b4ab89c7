"""SPLADE on a CPU: steps of a fused SparseEncoder beside the untouched one's, and memory of the vectors alone.

Random weights in fp32, XQuAD's questions and the passages that answer them, padded to the longest of each column;
sentence-transformers' SpladeLoss with both regularizers, forward and backward, no optimizer. With random weights a
passage has nearly all words, which is the most that there is to do in backward. Both take turns, by CPU time of the
process, with dropout 0.1. Without dropout, they must have the same loss, or there is no result.

Memory is that of the scores, their pooling and its backward, beyond inputs and the gradients' own: peaks of processes.

    python -m benchmarks.embedding.splade SIDE     one measurement of memory, as JSON
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.embedding.batch_memory import peak
from benchmarks.embedding.contrastive import MAX_LENGTH, pairs_of
from benchmarks.kit import bert
from benchmarks.kit.clock import interleaved
from benchmarks.kit.study import in_a_process
from benchmarks.recipes.data import minilm

TEXTS, LENGTH = 32, 256
SIDES = ("bert_fast", "theirs")
_AGREE = 1e-4  # of losses, relative


def _model(size: bert.Size, layers: int | None, folder: Path) -> Any:
    """A SparseEncoder of random weights, of so many layers if not all, with MiniLM's tokenizer."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    options = {} if layers is None else {"num_hidden_layers": layers}
    BertForMaskedLM(size.config(BertConfig, **options)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(minilm())).save_pretrained(folder)
    encoder = Transformer(str(folder), transformer_task="fill-mask")
    model = SparseEncoder(modules=[encoder, SpladePooling()], device="cpu")
    model.max_seq_length = MAX_LENGTH
    return model


def _loss(loss: nn.Module, features: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack(list(loss([dict(column) for column in features], None).values())).sum()


def _step(model: Any, loss: nn.Module, features: list[dict[str, Tensor]]) -> None:
    model.zero_grad(set_to_none=True)
    _loss(loss, features).backward()


def run_splade(shape: str, num_pairs: int, threads: int, rounds: int, layers: int | None = None) -> dict[str, Any]:
    """Times steps of so many pairs."""
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    import bert_fast

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            models = {side: _model(bert.BY_NAME[shape], layers, Path(folder)) for side in SIDES}
        bert_fast.fuse(models["bert_fast"])
        columns = map(list, zip(*pairs_of(num_pairs), strict=True))
        features = [dict(models["theirs"].preprocess(column)) for column in columns]
        losses = {
            side: SpladeLoss(
                model, SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=3e-5,
                query_regularizer_weight=5e-5,
            )
            for side, model in models.items()
        }  # fmt: skip
        with torch.no_grad():  # in evaluation theirs overwrites what backward would need
            found = {side: float(_loss(losses[side].eval(), features)) for side in SIDES}
        if abs(found["bert_fast"] - found["theirs"]) > _AGREE * abs(found["theirs"]):
            raise RuntimeError(f"splade: losses differ, {found}: nothing to time")
        steps = {side: lambda side=side: _step(models[side], losses[side].train(), features) for side in SIDES}
        times = interleaved(steps, rounds, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    masks = [column["attention_mask"] for column in features]
    return {
        "case": f"splade/{shape if layers is None else f'{shape}, {layers} layers'}/{num_pairs}/{threads}",
        "pairs": num_pairs,
        "real_tokens": int(sum(mask.sum() for mask in masks)),
        "fill": round(float(sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks)), 4),
        **{f"{side}_cpu_s": round(taken.median, 4) for side, taken in times.items()},
        "ratio": round(times["bert_fast"].speedup_over(times["theirs"]), 3),
        **{f"{side}_all_cpu_s": [round(s, 4) for s in taken.seconds] for side, taken in times.items()},
    }


def measure(side: str) -> int:
    """Bytes that vectors of `TEXTS` full texts of BERT-base take, forward and backward; of this process, once."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from torch.nn import functional as F

    from bert_fast.ops import splade

    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden, words = bert.BASE.hidden, bert.VOCAB_SIZE
    leaves = [torch.randn(TEXTS * LENGTH, hidden), torch.randn(words, hidden) / hidden**0.5, torch.randn(words) - 2]
    for leaf in leaves:
        leaf.requires_grad_().grad = torch.zeros_like(leaf)
    x, weight, bias = leaves
    dy, before = torch.randn(TEXTS, words), peak()
    if side == "bert_fast":
        y = splade(x, weight, bias, torch.arange(TEXTS + 1, dtype=torch.int32) * LENGTH)
    else:
        scores = F.linear(x, weight, bias).view(TEXTS, LENGTH, words)
        features = {"token_embeddings": scores, "attention_mask": torch.ones(TEXTS, LENGTH)}
        y = SpladePooling().train()(features)["sentence_embedding"]
        del scores, features
    y.backward(dy)
    return peak() - before


def run_splade_memory() -> dict[str, Any]:
    """Peaks of both sides."""
    found = {side: in_a_process("embedding.splade", side, threads=1)["bytes"] for side in SIDES}
    return {
        "case": "splade_memory/base", "texts": TEXTS, "length": LENGTH,
        **{f"{side}_bytes": size for side, size in found.items()},
        "share": round(found["bert_fast"] / found["theirs"], 4),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"bytes": measure(sys.argv[1])}))
