"""Embedding models on one device: contrastive steps and encoding, beside sentence-transformers, padded and packed.

    step     forward and backward of in-batch negatives (questions of 8 to 24 tokens, passages of 64 to 192), dropout
             0.1, fp32 parameters under autocast to bf16, PyTorch's fused AdamW; tokenized beforehand
    encode   raw texts of 50 tokens on average (2 to 98) to vectors on the host, parameters in bf16, tokenizing and all

    bert_fast   step: BertForTextEmbedding on packed tokens; encode: the model of st after `bert_fast.fuse`
    st          sentence-transformers on padded batches with SDPA, its defaults
    st_packed   the same with its own packing: flash attention, inputs flattened; left out, with the reason, where the
                machine has no flash attention that transformers takes

Weights are drawn once, on the device, and words are made up: nothing is needed beside the project but the packages.
Vectors without dropout, less their mean over texts, must point as bert_fast's do, or a contestant is red and not timed.
(Losses differ: under autocast sentence-transformers rounds scores of up to 20 to bf16, in steps of 0.125.)
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.kit.bert import BY_NAME, VOCAB_SIZE
from benchmarks.kit.clock import Times, interleaved
from benchmarks.kit.results import reason
from bert_fast import BertConfig, BertForTextEmbedding, BertTokenizer, fuse, losses

PROVIDERS = ("bert_fast", "st", "st_packed")
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LIKE = 0.95  # cosine of two vectors of one text, made in bf16 by other kernels; of two texts it is about 0


@dataclass(frozen=True)
class EmbeddingCase:
    """mode: "step", of `count` pairs, or "encode", of `count` texts."""

    shape: str
    mode: str
    count: int
    vocab_size: int = VOCAB_SIZE
    longest: int = 512

    @property
    def name(self) -> str:
        """Stable name used in results."""
        return f"embedding/{self.shape}/{self.mode}/{self.count}"

    def texts(self) -> list[list[str]]:
        """Columns of texts, of words that are tokens: questions and passages, or texts alone."""
        draw = np.random.default_rng(0)
        ranges = ((8, 24), (64, 192)) if self.mode == "step" else ((2, 98),)
        columns = []
        for least, most in ranges:
            lengths = np.minimum(draw.integers(least, most + 1, self.count), self.longest) - 2
            words = [draw.integers(len(_SPECIAL), self.vocab_size, max(length, 0)) for length in lengths]
            columns.append([" ".join(f"w{word}" for word in some) for some in words])
        return columns


# The most telling first: should time run out, the others are missing.
CASES = (
    EmbeddingCase("minilm", "encode", 32768),
    EmbeddingCase("base", "step", 256),
    EmbeddingCase("minilm", "step", 512),
    EmbeddingCase("base", "encode", 8192),
)
SMALL_CASES = (
    EmbeddingCase("tiny", "step", 4, vocab_size=100, longest=16),
    EmbeddingCase("tiny", "encode", 9, vocab_size=100, longest=16),
)


class Contestant:
    """A model with its form of the texts. `run` does all of it once and returns the loss, or the vectors."""

    def __init__(self, provider: str, case: EmbeddingCase, folder: Path, device: torch.device) -> None:
        self.provider, self.device, self._case = provider, device, case
        self._dtype = torch.bfloat16 if case.mode == "encode" else torch.float32
        is_own = provider == "bert_fast" and case.mode == "step"
        self.model: nn.Module = self._own(folder) if is_own else self._sentence_transformer(provider, folder)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def _own(self, folder: Path) -> nn.Module:
        columns, tokenizer = self._case.texts(), BertTokenizer.from_pretrained(folder)
        model = BertForTextEmbedding.from_pretrained(folder).to(self.device)
        batch = tokenizer.pack([text for pair in zip(*columns, strict=True) for text in pair]).to(self.device)
        inputs = {name: batch[name] for name in ("input_ids", "cu_seqlens", "max_seqlen")}

        self._embeddings = lambda: model(**inputs).embeddings.unflatten(0, (-1, 2)).unbind(1)
        self._loss = lambda: losses.in_batch_negatives(*self._embeddings())
        return model

    def _sentence_transformer(self, provider: str, folder: Path) -> nn.Module:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        attention = "flash_attention_2" if provider == "st_packed" else "sdpa"
        model = SentenceTransformer(
            str(folder), device=str(self.device),
            model_kwargs={"attn_implementation": attention, "dtype": self._dtype},
        )  # fmt: skip
        model.max_seq_length = self._case.longest
        if provider == "st_packed" and not getattr(model[0], "can_flatten_inputs", False):
            raise RuntimeError("sentence-transformers does not flatten inputs here")
        columns = self._case.texts()
        if self._case.mode == "encode":
            if provider == "bert_fast":
                fuse(model)
            self.encode: Callable[[], Any] = lambda: model.encode(columns[0], batch_size=256, show_progress_bar=False)
            return cast(nn.Module, model)
        features = [
            {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in one.items()}
            for one in (model.preprocess(column) for column in columns)
        ]
        criterion = MultipleNegativesRankingLoss(model)
        self._embeddings = lambda: [model(dict(one))["sentence_embedding"] for one in features]
        self._loss = lambda: criterion([dict(one) for one in features], None)
        return cast(nn.Module, model)

    def loss(self) -> Tensor:
        """Of all pairs."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self._loss()

    def run(self) -> Any:
        """All of it once; returns when the device is through."""
        if self._case.mode == "encode":
            return self.encode()
        loss = self.loss()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return loss.detach()

    def peak_bytes(self) -> int | None:
        """Memory at the height of a run, beyond what there is without it; None on a CPU."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def vectors(self) -> np.ndarray:
        """Of all texts, without dropout: float32 [n, H]."""
        if self._case.mode == "encode":
            return np.asarray(self.encode(), dtype=np.float32)
        self.model.eval()
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            made = torch.cat([vectors.float() for vectors in self._embeddings()])
        self.model.train()
        return made.cpu().numpy()


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of rows of the same number, less the mean of each array."""
    a, b = a - a.mean(0), b - b.mean(0)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / np.maximum(norms, 1e-30)).min())


def write_model(case: EmbeddingCase, folder: Path, device: torch.device) -> None:
    """A model with drawn weights and its tokenizer, as a folder of sentence-transformers."""
    torch.manual_seed(0)
    config = BY_NAME[case.shape].config(
        BertConfig, vocab_size=case.vocab_size, max_position_embeddings=max(512, case.longest)
    )
    with device:
        BertForTextEmbedding(config).save_pretrained(folder)
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), case.vocab_size))]
    BertTokenizer(words, model_max_length=case.longest).save_pretrained(folder)


def time_embedding(case: EmbeddingCase, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a result for each contestant, or {"provider", "skipped"}: why there is none."""
    entered: dict[str, Contestant] = {}
    right = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(case, folder, device)
        tokenizer = BertTokenizer.from_pretrained(folder)
        tokens = sum(len(tokenizer.pack(column).input_ids) for column in case.texts())
        for provider in PROVIDERS:
            try:
                contestant = Contestant(provider, case, folder, device)
                found = contestant.vectors()
                right = found if right is None else right
                if (least := least_cosine(found, right)) < _LIKE:
                    yield {"provider": provider, "skipped": f"red: vectors differ, least cosine {least:.4f}"}
                    continue
                contestant.run()
                entered[provider] = contestant
            except Exception as failure:  # memory of the device, a package that is not there: its result
                yield {"provider": provider, "skipped": reason(failure, 300)}
    times = interleaved({provider: one.run for provider, one in entered.items()}, rounds, warmup=2)
    for provider, taken in times.items():
        yield _result(case, provider, tokens, taken, times.get("bert_fast"), entered[provider])


def _result(
    case: EmbeddingCase, provider: str, tokens: int, taken: Times, ours: Times | None, contestant: Contestant
) -> dict[str, Any]:
    num_texts = case.count * (2 if case.mode == "step" else 1)
    return {
        "case": case.name,
        "provider": provider,
        **taken.milliseconds(),
        "texts_per_s": round(num_texts / taken.median, 1),
        "real_tokens_per_s": round(tokens / taken.median, 1),
        "tokens_per_text": round(tokens / num_texts, 2),
        "peak_bytes": contestant.peak_bytes(),
        "bert_fast_speedup": None if ours is None else round(ours.speedup_over(taken), 3),
        "rounds": len(taken.seconds),
    }
