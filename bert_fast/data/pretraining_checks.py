"""What a text says of the training to come: the loss of a guess without context."""

import numpy as np

from bert_fast.data.masking import MASKED, REPLACED
from bert_fast.data.pretraining import PretrainingSource

_EXAMPLES_AT_ONCE = 1 << 12


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
