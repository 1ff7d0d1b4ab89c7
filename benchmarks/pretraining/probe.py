"""What a pre-trained model has learned: losses and accuracies by kind of word, next sentences, and shuffled words."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bert_fast.data.pretraining import PretrainingSource, token_counts
from bert_fast.data.pretraining_checks import context_free_loss
from bert_fast.data.token_store import TokenStore

# Words that a sentence is held together by, whatever it is about.
_FUNCTION_WORDS = """
a an the this that these those i you he she it we they me him her us them my your his its our their who whom which what
of to in on at by for from with without into upon over under about after before between through against and or but nor
if as than when while because so not no is am are was were be been being do does did have has had will would shall
should may might can could must there here then
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
_NAME_SHARE, _NAME_COUNT = 0.8, 3
_EXAMPLES_AT_ONCE = 256


def names_in(path: Path) -> frozenset[str]:
    """Words of a text, in lower case, that within sentences have a capital three times at least, and mostly."""
    capital: Counter[str] = Counter()
    small: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        for word in re.findall(r"(?<=[a-z,;] )[A-Za-z]+", line):
            (capital if word[0].isupper() else small)[word.lower()] += 1
    return frozenset(
        word
        for word, count in capital.items()
        if count >= _NAME_COUNT and count >= _NAME_SHARE * (count + small[word]) and len(word) > 1
    )


def probe(
    model: Any, source: PretrainingSource, train: TokenStore, names: frozenset[str], seed: int = 0
) -> dict[str, Any]:
    """What a model says about all examples of epoch 0.

    Args:
        model: a BertForPreTraining, in evaluation mode.
        source: examples that it was not trained on.
        train: the text that it was trained on, for frequencies.
        names: see `names_in`.
        seed: of the shuffling.

    Returns: masked_lm; shuffled (the same with the words that are not to be predicted in random order within their
        text); context_free_loss; masked_accuracy; next_sentence_accuracy; kinds: {kind: number, loss, accuracy}. Kinds
        of the words to predict: function; name; repeated (another word that also stands elsewhere in the example, to be
        seen); piece (of a word, from its second on); sign (punctuation, digits); other.
    """
    tokenizer = source.tokenizer
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    generator = np.random.default_rng(seed)
    losses, right, shuffled, kinds, pairs = [], [], [], [], []
    with torch.inference_mode():
        for start in range(0, len(source.lengths(0)), _EXAMPLES_AT_ONCE):
            batch = source.batch(0, np.arange(start, min(start + _EXAMPLES_AT_ONCE, len(source.lengths(0)))))
            loss, said, follows = _ask(model, batch)
            losses.append(loss)
            right.append(said == batch["labels"].numpy())
            pairs.append((follows < 0.5) == (batch["next_sentence_label"].numpy() == 1))
            kinds += _kinds(batch, tokens, names, tokenizer.mask_token_id)
            mixed = dict(batch) | {
                "input_ids": torch.from_numpy(_shuffled(batch, tokenizer.all_special_ids, generator))
            }
            shuffled.append(_ask(model, mixed)[0])
    loss, is_right, kind = np.concatenate(losses), np.concatenate(right), np.array(kinds)
    return {
        "examples": len(source.lengths(0)),
        "masked": len(loss),
        "masked_lm": float(loss.mean()),
        "shuffled": float(np.concatenate(shuffled).mean()),
        "context_free_loss": context_free_loss(source, token_counts(train, tokenizer)),
        "masked_accuracy": float(is_right.mean()),
        "next_sentence_accuracy": float(np.concatenate(pairs).mean()),
        "kinds": {
            name: {
                "number": int((kind == name).sum()),
                "loss": round(float(loss[kind == name].mean()), 4),
                "accuracy": round(float(is_right[kind == name].mean()), 4),
            }
            for name in sorted(set(kinds))
        },
    }


def _ask(model: Any, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss of every word to predict, the likeliest token there, probability that B follows A)."""
    output = model(**batch, output_logits=True)
    scores = output["prediction_logits"].float()
    loss = F.cross_entropy(scores, batch["labels"], reduction="none")
    follows = output["seq_relationship_logits"].float().softmax(dim=1)[:, 0]
    return loss.numpy(), scores.argmax(dim=1).numpy(), follows.numpy()


def _shuffled(batch: Any, special_ids: list[int], generator: np.random.Generator) -> np.ndarray:
    """input_ids with what is neither special nor to be predicted in another order, within text A and within B."""
    ids = batch["input_ids"].numpy().copy()
    is_free = ~np.isin(ids, special_ids)
    is_free[batch["masked_lm_positions"].numpy()] = False
    sequence = np.repeat(np.arange(len(batch["cu_seqlens"]) - 1), np.diff(batch["cu_seqlens"].numpy()))
    text = 2 * sequence + batch["token_type_ids"].numpy()
    places = np.flatnonzero(is_free)
    order = np.lexsort((generator.random(len(places)), text[places]))
    ids[places] = ids[places[order]]  # places ascend, and so do their texts
    return ids


def _kinds(batch: Any, tokens: list[str], names: frozenset[str], mask_id: int) -> list[str]:
    ids, positions, labels = (batch[key].numpy() for key in ("input_ids", "masked_lm_positions", "labels"))
    bounds = batch["cu_seqlens"].numpy()
    sequence = np.searchsorted(bounds, positions, side="right") - 1
    hidden = np.zeros(len(ids), dtype=bool)
    hidden[positions] = True
    seen = [set(ids[a:b][~hidden[a:b]].tolist()) for a, b in pairwise(bounds)]
    found = []
    for label, number in zip(labels.tolist(), sequence.tolist(), strict=True):
        word = tokens[label]
        if word.startswith("##"):
            found.append("piece")
        elif not word.isalpha():
            found.append("sign")
        elif word in FUNCTION_WORDS:
            found.append("function")
        elif word in names:
            found.append("name")
        else:
            found.append("repeated" if label in seen[number] else "other")
    return found
