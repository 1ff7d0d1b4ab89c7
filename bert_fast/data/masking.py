"""Masked-LM examples: which tokens are to be predicted, and what stands in their place.

    [CLS] the quick brown fox jumps [SEP]      15 % of 5 words are 0.75: one word is chosen with probability 0.75
    [CLS] the quick [MASK] fox jumps [SEP]     positions [3]    labels [brown]

Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1; whole words: Cui et al. 2019
(arXiv:1906.08101), section 2.
"""

from typing import NamedTuple

import numpy as np

from bert_fast.checks import check_flag, check_number
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.data.counter_random import CounterRandom
from bert_fast.data.sequences import ranges
from bert_fast.tokenization import Tokenizer

MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens: [MASK], any word; the rest stay as they are
_PLACE_BITS, _RANDOM_BITS = 16, 28  # of a sort key; 20 bits are left for the number of the sequence
_MAX_SEQUENCES = 1 << (64 - _PLACE_BITS - _RANDOM_BITS)


class Masked(NamedTuple):
    """A batch with hidden words: input_ids (int64 [T]); positions (int64 [M], ascending); labels (int64 [M])."""

    input_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


class Masking:
    """Chooses tokens of packed sequences and hides them; a pure function of (seed, epoch, example, place in it).

    Of the n units of a sequence, exactly floor(p * n + u) are chosen, u uniform in [0, 1) for each sequence: so p * n
    on average, whatever n. All sets of units of that size are equally likely. A unit is a token, or with whole_words a
    word: a token and the pieces that follow it ("##" of WordPiece; of Unigram, those without a space in front). Of the
    tokens chosen, each for itself, 80 % become [MASK], 10 % a uniformly random token of the vocabulary, 10 % stay as
    they are.

    Special tokens ([UNK] among them, and those that stand in the text) are never chosen, and never put in the place of
    another.

    Raises: TypeError, ValueError naming the argument.
    """

    def __init__(self, tokenizer: Tokenizer, *, mask_probability: float = 0.15, whole_words: bool = False) -> None:
        check_tokenizer_kind(tokenizer)
        check_flag("whole_words", whole_words)
        if not 0 < check_number("mask_probability", mask_probability) <= 1:
            raise ValueError(f"mask_probability: expected a number above 0, at most 1, got {mask_probability}")
        if tokenizer.mask_token_id is None:
            raise ValueError("tokenizer: expected one with a mask_token, got one without")
        self.mask_probability = float(mask_probability)
        self.mask_id = tokenizer.mask_token_id
        vocab = tokenizer.get_vocab()
        ids = np.fromiter(vocab.values(), dtype=np.int64, count=len(vocab))
        self._is_maskable = np.zeros(int(ids.max()) + 1, dtype=bool)
        self._is_maskable[ids] = True
        self._is_maskable[tokenizer.all_special_ids] = False
        self._words = np.flatnonzero(self._is_maskable)
        if not len(self._words):
            raise ValueError("tokenizer: expected words in the vocabulary, got special tokens only")
        self._is_piece: np.ndarray | None = None
        if whole_words:
            self._is_piece = np.zeros_like(self._is_maskable)
            self._is_piece[tokenizer.continuing_ids()] = True

    def __call__(
        self, input_ids: np.ndarray, cu_seqlens: np.ndarray, examples: np.ndarray, seed: int, epoch: int
    ) -> Masked:
        """Hides words of a batch.

        input_ids (int64 [T]): packed sequences with their special tokens, at most 2^16 tokens each; left alone.
        cu_seqlens (int [B + 1]): their boundaries; B is at most 2^20.
        examples (int64 [B]): the numbers by which chance knows the sequences.
        """
        starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
        if len(starts) > _MAX_SEQUENCES or lengths.max(initial=0) > 1 << _PLACE_BITS:
            raise ValueError(
                f"cu_seqlens: expected at most {_MAX_SEQUENCES} sequences of {1 << _PLACE_BITS} tokens, got "
                f"{len(starts)} of up to {lengths.max(initial=0)}"
            )
        is_maskable = self._is_maskable[input_ids]
        is_first = is_maskable if self._is_piece is None else self._first_tokens(input_ids, is_maskable, cu_seqlens)
        units = np.flatnonzero(is_first)
        chosen = self._choose(units, cu_seqlens, examples, seed, epoch)
        if self._is_piece is not None:
            is_chosen: np.ndarray = np.zeros(len(input_ids), dtype=bool)
            is_chosen[chosen] = True
            is_chosen = is_chosen[units]
            of_unit = np.cumsum(is_first) - 1  # of the tokens before the first unit: -1, not maskable
            chosen = np.flatnonzero(is_maskable & is_chosen[of_unit]) if len(units) else chosen
        return self._hide(input_ids, chosen, cu_seqlens, examples, seed, epoch)

    def _first_tokens(self, input_ids: np.ndarray, is_maskable: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
        """Where words begin; a piece without a word before it, where a text was cut, begins one."""
        assert self._is_piece is not None
        places, is_piece = np.arange(len(input_ids)), self._is_piece[input_ids]
        is_border = ~(is_maskable | is_piece)
        is_border[cu_seqlens[:-1][cu_seqlens[:-1] < len(places)]] = True
        border = np.maximum.accumulate(np.where(is_border, places, -1))
        maskable_before = np.full(len(places) + 1, -1)
        maskable_before[1:] = np.maximum.accumulate(np.where(is_maskable, places, -1))
        return is_maskable & (~is_piece | (maskable_before[:-1] < border))

    def _choose(
        self, units: np.ndarray, cu_seqlens: np.ndarray, examples: np.ndarray, seed: int, epoch: int
    ) -> np.ndarray:
        """Of the units (places in the batch, int64 [N], ascending) those that are chosen, likewise."""
        bounds = np.searchsorted(units, cu_seqlens)
        counts = np.diff(bounds)  # of units, by sequence
        rounding = CounterRandom(seed, epoch, "number of masked words").uniform(examples)
        num_chosen = np.minimum((self.mask_probability * counts + rounding).astype(np.int64), counts)
        places = units - np.repeat(cu_seqlens[:-1], counts)
        draws = CounterRandom(seed, epoch, "masked words").bits(_counters(examples, counts, places))
        draws >>= np.uint64(64 - _RANDOM_BITS)
        # In a sequence, the units with the smallest random numbers: the keys are (sequence, random, place).
        sequence = np.repeat(np.arange(len(counts)), counts)
        keys = ((sequence << (_PLACE_BITS + _RANDOM_BITS)) | places).astype(np.uint64)
        keys |= draws << np.uint64(_PLACE_BITS)
        # Sorting costs most, and few can be among the smallest: a limit four standard deviations up spares the others.
        share = (num_chosen + 4 * np.sqrt(num_chosen) + 4) / np.maximum(counts, 1)
        limit = (np.minimum(share, 1) * (1 << _RANDOM_BITS)).astype(np.uint64)
        is_low = draws < np.repeat(limit, counts)
        num_low = np.bincount(sequence[is_low], minlength=len(counts))
        if (num_low >= num_chosen).all():
            keys, counts = keys[is_low], num_low
        keys.sort()
        first = np.cumsum(counts) - counts
        picked = keys[ranges(first, num_chosen)] & np.uint64((1 << _PLACE_BITS) - 1)
        chosen = picked.astype(np.int64) + np.repeat(cu_seqlens[:-1], num_chosen)
        chosen.sort()
        return chosen

    def _hide(
        self, input_ids: np.ndarray, chosen: np.ndarray, cu_seqlens: np.ndarray, examples: np.ndarray, seed: int,
        epoch: int,
    ) -> Masked:  # fmt: skip
        counts = np.diff(np.searchsorted(chosen, cu_seqlens))
        counters = _counters(examples, counts, chosen - np.repeat(cu_seqlens[:-1], counts))
        fate = CounterRandom(seed, epoch, "fate of masked words").uniform(counters)
        hidden, labels = input_ids.copy(), input_ids[chosen]
        hidden[chosen[fate < MASKED]] = self.mask_id
        is_replaced = (fate >= MASKED) & (fate < MASKED + REPLACED)
        drawn = CounterRandom(seed, epoch, "random words").integers(len(self._words), counters[is_replaced])
        hidden[chosen[is_replaced]] = self._words[drawn]
        return Masked(hidden, chosen, labels)


def _counters(examples: np.ndarray, counts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A number for each place in an example: int64 [N]; example i has counts[i] of them."""
    return np.repeat(examples << _PLACE_BITS, counts) + places
