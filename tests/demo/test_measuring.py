"""Timing, saved bytes, sentence vectors: what the numbers of the demo rest on."""

import torch
from torch import nn
from torch.nn import functional as F

from bert_fast.demo.saved_bytes import saved_bytes
from bert_fast.demo.search import embed
from bert_fast.demo.timing import Timing, interleaved
from bert_fast.models import BertConfig, BertModel
from bert_fast.tokenization import BertTokenizer


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    ticks: list[int] = []
    contestants = {name: (lambda name=name: calls.append(name)) for name in "AB"}
    timings = interleaved(contestants, tokens=7, rounds=2, advance=lambda: ticks.append(1), warmup=1)
    assert "".join(calls) == "ABABAB"
    assert len(ticks) == len(calls)
    assert all(timing.tokens == (7, 7) and len(timing.seconds) == 2 for timing in timings.values())


def test_ratio_is_taken_round_by_round() -> None:
    mine, theirs = Timing((10, 10, 10), (1.0, 2.0, 4.0)), Timing((10, 10), (2.0, 4.0))
    assert mine.speedup_over(theirs) == 2.0
    assert mine.tokens_per_s == 5.0


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    model = nn.Linear(8, 16, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        y = model(x)  # saves x and the weight
        return (y * y.view(16, 4).view(4, 16)).sum()  # saves y twice, one storage

    assert saved_bytes(model, forward) == 4 * (4 * 8 + 4 * 16)


def test_saved_bytes_tells_freed_storages_apart() -> None:
    x = torch.randn(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y.sin()  # saves its input; without a reference each could land where the last one was
        return y

    assert saved_bytes(nn.Identity(), forward) == 5 * 4 * 1000


def test_vectors_are_means_over_real_tokens() -> None:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    tokenizer = BertTokenizer(vocab)
    config = BertConfig(vocab_size=8, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    model = BertModel(config).eval()
    texts = ["a", "a b c c b a", "b c"]
    vectors, num_tokens = embed(model, tokenizer, texts, max_length=6, max_tokens=14)
    assert num_tokens == 3 + 6 + 4
    batch = tokenizer(texts, padding=True, truncation=True, max_length=6, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    expected = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    torch.testing.assert_close(vectors, expected)
    # a budget too small for all
    assert len(embed(model, tokenizer, texts, max_length=6, max_tokens=12)[0]) == 2
