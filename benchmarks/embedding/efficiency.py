"""`encode` on texts as long as those of sentence-transformers' page on efficiency, on a CPU, fp32.

English prose, cut to numbers of characters drawn with the mean and deviation that the page gives for its data
(sbert.net, Sentence Transformer, Usage, Speeding up Inference). MiniLM has its weights and takes 256 tokens at most;
BERT-base has 4 of its layers, random weights, and takes 512.

    untouched  sentence-transformers' model, whose attention is PyTorch's SDPA
    compiled   the same after its `compile(dynamic=True)`
    bf16       the first under autocast to bfloat16
    fused      the first after `bert_fast.fuse`
    fused_bf16 the fused one under autocast to bfloat16

They take turns, by CPU time of the process, on one thread, in batches of 32, the default. (The page takes every
back-end's best batch size.) All must have the same vectors, in bf16 nearly, or there is no result.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.embedding.contrastive import pairs_of
from benchmarks.kit.bert import BASE
from benchmarks.kit.clock import interleaved
from benchmarks.models.build import their_model
from benchmarks.recipes.data import minilm
from bert_fast import fuse, why_not

MODELS = {"minilm": 256, "base, 4 layers": 512}  # and the most tokens of a text
# Data of the page -> mean and deviation of the number of characters, and how many texts are drawn here.
TEXTS = {"stsb": (38.9, 13.9, 96), "natural-questions": (619.6, 345.3, 32), "imdb, four times": (9589.3, 633.4, 8)}
PROVIDERS = ("untouched", "compiled", "bf16", "fused", "fused_bf16")
_AGREE = dict.fromkeys(("bf16", "fused_bf16"), 0.1)
_AGREE_FP32 = 1e-5  # of unit vectors


def name_of(model: str) -> str:
    """What the names of its results, one for each data set, begin with."""
    return f"efficiency/{model}"


def texts_of(data: str) -> list[str]:
    """Prose of as many characters. FileNotFoundError where the texts are not there."""
    mean, deviation, count = TEXTS[data]
    lengths = np.random.default_rng(2026).normal(mean, deviation, count).round().clip(8).astype(int)
    prose, texts = " ".join(dict.fromkeys(passage for _, passage in pairs_of(10**6))), []
    for length in lengths:
        start = prose.index(" ", sum(map(len, texts))) + 1
        texts.append(prose[start : start + length])
    return texts


def _model(name: str, folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import AutoTokenizer

    if name == "minilm":
        model = SentenceTransformer(str(minilm()), device="cpu")
    else:
        torch.manual_seed(0)
        their_model("BertModel", BASE, num_hidden_layers=4).save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(minilm())).save_pretrained(folder)
        modules = [Transformer(str(folder)), Pooling(BASE.hidden, "mean"), Normalize()]
        model = SentenceTransformer(modules=modules, device="cpu")
    model.max_seq_length = MODELS[name]
    return model


def run_efficiency(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Times a model: a result for each data set. RuntimeError where vectors differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            models = {provider: _model(name, Path(folder)) for provider in PROVIDERS[:4]}
        models["fused_bf16"] = models["fused"]
        models["compiled"].compile(dynamic=True)
        if reasons := why_not(fuse(models["fused"])):
            raise RuntimeError(f"{name_of(name)}: not fused: {reasons}")
        for data in TEXTS:
            yield _timed(name, data, models, rounds)
    finally:
        torch.set_num_threads(before)


def _timed(name: str, data: str, models: dict[str, Any], rounds: int) -> dict[str, Any]:
    texts = texts_of(data)

    def encode(provider: str) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in provider):
            made: torch.Tensor = models[provider].encode(texts, convert_to_tensor=True)
        return made.float()

    vectors = {provider: encode(provider) for provider in PROVIDERS}
    for provider, found in vectors.items():
        if not (off := float((found - vectors["untouched"]).abs().max())) <= _AGREE.get(provider, _AGREE_FP32):
            raise RuntimeError(f"{name_of(name)}/{data}: {provider}: vectors differ by {off:.1e}: nothing to time")
    runs: dict[str, Callable[[], object]] = {one: lambda one=one: encode(one) for one in PROVIDERS}
    times = interleaved(runs, rounds, warmup=0, clock=time.process_time)
    tokens = models["fused"].tokenizer(texts, truncation=True, max_length=MODELS[name])["input_ids"]
    return {
        "case": f"{name_of(name)}/{data}",
        "threads": 1,
        "texts": len(texts),
        "real_tokens": sum(map(len, tokens)),
        **{f"{one}_cpu_s": round(taken.median, 4) for one, taken in times.items()},
        **{f"{one}_over_untouched": round(times[one].speedup_over(times["untouched"]), 3) for one in PROVIDERS[1:]},
        **{f"{one}_all_cpu_s": [round(s, 4) for s in taken.seconds] for one, taken in times.items()},
    }
