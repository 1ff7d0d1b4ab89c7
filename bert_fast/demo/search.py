"""Step 4: search by meaning: passages and questions as vectors, the nearest passages first."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.demo.progress import Track, silent
from bert_fast.demo.text import Passage
from bert_fast.models import BertModel
from bert_fast.tokenization import BertTokenizer

__all__ = ["Answer", "Hit", "SearchResult", "embed", "search"]

NUM_HITS = 3


@dataclass(frozen=True)
class Hit:
    """A passage and the cosine of the angle between its vector and the question's."""

    passage: Passage
    score: float


@dataclass(frozen=True)
class Answer:
    """The best passages for a question, best first."""

    question: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True)
class SearchResult:
    """Answers, and what it took to embed all passages."""

    num_passages: int
    num_tokens: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of embedding the passages, tokenizing included."""
        return self.num_tokens / self.seconds


def search(
    model: BertModel,
    tokenizer: BertTokenizer,
    passages: Sequence[Passage],
    questions: Sequence[str],
    max_length: int,
    max_tokens: int,
    track: Track = silent,
) -> SearchResult:
    """Embeds the passages, packed, and looks for the three nearest to each question.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        passages: what is searched.
        questions: any text.
        max_length: tokens of a passage or question; the rest is cut off.
        max_tokens: of a batch.
        track: told about every passage.
    """
    texts = [f"{passage.heading}. {passage.text}" for passage in passages]
    start = time.perf_counter()
    with track("embedding all passages", len(texts)) as advance:
        chunks, num_tokens, done = [], 0, 0
        while done < len(texts):
            vectors, used = embed(model, tokenizer, texts[done:], max_length, max_tokens)
            chunks.append(vectors)
            num_tokens += used
            done += len(vectors)
            for _ in range(len(vectors)):
                advance()
        index = torch.cat(chunks)  # [passages, H]
    seconds = time.perf_counter() - start
    answers = []
    for question in questions:
        scores = index @ embed(model, tokenizer, [question], max_length, max_tokens)[0][0]
        best = scores.topk(min(NUM_HITS, len(passages)))
        hits = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        answers.append(Answer(question, tuple(Hit(passages[place], score) for place, score in hits)))
    return SearchResult(len(passages), num_tokens, seconds, tuple(answers))


@torch.inference_mode()
def embed(
    model: BertModel, tokenizer: BertTokenizer, texts: Sequence[str], max_length: int, max_tokens: int
) -> tuple[Tensor, int]:
    """Unit vectors [N, H] of the first N texts, as many as fit into `max_tokens`, and how many tokens they have.

    A text's vector is the mean of its tokens' hidden states, as this model was trained for (Reimers and Gurevych 2019,
    arXiv:1908.10084).
    """
    batch = tokenizer.pack(list(texts), max_tokens=max_tokens, max_length=max_length).to(model.device)
    hidden = model(**batch).last_hidden_state  # [T, H]
    lengths = batch.cu_seqlens.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    sums = hidden.new_zeros(len(lengths), hidden.shape[1]).index_add_(0, rows, hidden)
    return F.normalize(sums / lengths[:, None], dim=1), len(hidden)
