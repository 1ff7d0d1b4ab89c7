"""What a text says of the training to come, before its first step: levels of the loss, unknown words, repeats."""

import numpy as np

from bert_fast.data.masking import MASKED, REPLACED
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.data.token_store import TokenStore, check_tokenizer
from bert_fast.tokenization import Tokenizer

__all__ = ["context_free_loss", "repeated_share", "unknown_share"]

_TOKENS_LOOKED_AT = 1 << 24  # of a store
_EXAMPLES_AT_ONCE = 1 << 12
_LONG = 8  # tokens of a sentence whose repetition is no chance: "he said ." is


def context_free_loss(source: PretrainingSource, counts: np.ndarray) -> float:
    """The masked-LM loss, in nats, of the best guess that looks at no other place than the one to be predicted.

    Where [MASK] stands it guesses by frequency. Where a word stands, it weighs that this one was kept against that it
    was put there by chance: p(kept | shown) = 0.1 q / (0.1 q + 0.1 / V), q being its frequency. It is the plateau that
    every BERT gets to before it learns to read: only a lower loss is one of context.

    Args:
        source: examples, of epoch 0.
        counts (int64 [vocabulary]): how often each token occurs in the text that was learned from; one is added to
            each, so that no word is impossible.

    Raises:
        ValueError: counts of another vocabulary.
    """
    tokenizer = source.tokenizer
    if len(counts) != len(tokenizer):
        raise ValueError(f"counts: expected one for each of {len(tokenizer)} tokens, got {len(counts)}")
    words = np.ones(len(counts), dtype=bool)
    words[tokenizer.all_special_ids] = False
    shares = np.where(words, counts + 1.0, 0.0)
    shares /= shares.sum()
    kept, replaced = (1 - MASKED - REPLACED) * shares, REPLACED / words.sum()
    is_kept = kept / (kept + replaced)
    total, number, num_examples = 0.0, 0, len(source.lengths(0))
    for start in range(0, num_examples, _EXAMPLES_AT_ONCE):
        batch = source.batch(0, np.arange(start, min(start + _EXAMPLES_AT_ONCE, num_examples)))
        there = batch["labels"].numpy()
        shown = batch["input_ids"].numpy()[batch["masked_lm_positions"].numpy()]
        is_masked = shown == tokenizer.mask_token_id
        sure = np.where(is_masked, 0.0, is_kept[shown])
        chance = sure * (shown == there) + (1 - sure) * shares[there]
        total -= float(np.log(chance).sum())
        number += len(there)
    return total / max(1, number)


def unknown_share(store: TokenStore, tokenizer: Tokenizer) -> float:
    """Share of a store's tokens that are [UNK]: what the tokenizer has no pieces for.

    Raises:
        StoreError: the store was made with another tokenizer.
    """
    check_tokenizer(store.path, store.info, tokenizer)
    tokens, unknown = store.tokens[:_TOKENS_LOOKED_AT], tokenizer.unk_token_id
    return 0.0 if unknown is None or not len(tokens) else float(np.count_nonzero(tokens == unknown) / len(tokens))


def repeated_share(store: TokenStore) -> float:
    """Share of a store's tokens in sentences of at least 8 tokens that stood there before, of the first 16 million.

    Sentences of a store without them are documents.
    """
    bounds = store.boundaries if store.sentence_boundaries is None else store.sentence_boundaries
    bounds = np.asarray(bounds)
    bounds = bounds[bounds <= _TOKENS_LOOKED_AT]
    lengths = np.diff(bounds)
    starts, lengths = bounds[:-1][lengths >= _LONG], lengths[lengths >= _LONG]
    if not len(starts):
        return 0.0
    # A sentence by two sums modulo 2^64 over its tokens, each times a number of its place: chance collisions are out.
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = store.tokens.take(places + np.repeat(starts, lengths)).astype(np.uint64) + np.uint64(1)
    firsts = np.cumsum(lengths) - lengths
    factors = np.random.default_rng(0).integers(1, 2**63, int(lengths.max()), dtype=np.uint64) * np.uint64(2)
    factors += np.uint64(1)
    sums = np.add.reduceat(tokens * factors[places], firsts)
    _, first = np.unique(sums, return_index=True)
    is_new = np.zeros(len(sums), dtype=bool)
    is_new[first] = True
    return float(lengths[~is_new].sum() / max(1, bounds[-1]))
