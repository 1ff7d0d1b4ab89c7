"""Masked words: exactly as many as defined, all choices equally likely, the same in any batch."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from bert_fast import BertTokenizer
from bert_fast.data.masking import Masked, Masking

from .corpora import PIECES, SPECIAL, WORDS, make_tokenizer

LEAST_P = 1e-4
PAD, UNK, CLS, SEP, MASK = range(5)
WORD, PIECE = len(SPECIAL), len(SPECIAL) + len(WORDS)  # ids of the first of each
VOCAB = PIECE + len(PIECES)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return make_tokenizer()


def mask(
    masking: Masking, sequences: Sequence[Sequence[int]], examples: Sequence[int] | None = None, epoch: int = 0
) -> Masked:
    ids = np.array(list(itertools.chain.from_iterable(sequences)), dtype=np.int64)
    cu_seqlens = np.array(list(itertools.accumulate(map(len, sequences), initial=0)))
    numbers = np.arange(len(sequences)) if examples is None else np.array(examples)
    before = ids.copy()
    found = masking(ids, cu_seqlens, numbers, seed=1, epoch=epoch)
    assert np.array_equal(ids, before)
    assert found.positions.dtype == found.labels.dtype == found.input_ids.dtype == np.int64
    assert (np.diff(found.positions) > 0).all() and np.array_equal(found.labels, ids[found.positions])
    kept = np.ones(len(ids), dtype=bool)
    kept[found.positions] = False
    assert np.array_equal(found.input_ids[kept], ids[kept])
    return found


def sentence(length: int) -> list[int]:
    return [CLS, *(WORD + index % len(WORDS) for index in range(length - 2)), SEP]


def counts_by_sequence(found: Masked, lengths: Sequence[int]) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.bincount(np.searchsorted(ends, found.positions, side="right"), minlength=len(lengths))


@pytest.mark.parametrize("p", [0.01, 0.15, 0.5, 0.999, 1.0])
def test_as_many_words_as_defined(tokenizer: BertTokenizer, p: float) -> None:
    lengths = [2, 3, 4, 9, 22, 102, 512] * 300
    found = mask(Masking(tokenizer, mask_probability=p), [sentence(length) for length in lengths])
    counts = counts_by_sequence(found, lengths)
    expected = p * (np.array(lengths) - 2)
    assert ((counts == np.floor(expected)) | (counts == np.floor(expected) + 1)).all()
    assert (counts <= np.array(lengths) - 2).all()
    for length in set(lengths):  # rounded up as often as the fraction says
        some = counts[np.array(lengths) == length]
        whole, fraction = divmod(p * (length - 2), 1)
        if 0.001 < fraction < 0.999:
            assert stats.binomtest(int((some > whole).sum()), len(some), fraction).pvalue > LEAST_P


def test_every_set_of_words_is_equally_likely(tokenizer: BertTokenizer) -> None:
    sequences = [[CLS, *range(WORD, WORD + 6), SEP]] * 20_000
    found = mask(Masking(tokenizer, mask_probability=0.5), sequences)
    chosen = found.positions.reshape(-1, 3) % 8
    _, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(counts) == 20 and stats.chisquare(counts).pvalue > LEAST_P


def test_every_place_of_long_sequences_is_equally_likely(tokenizer: BertTokenizer) -> None:
    found = mask(Masking(tokenizer), [sentence(130)] * 2000)
    counts = np.bincount(found.positions % 130, minlength=130)
    assert counts[0] == counts[129] == 0
    # Chosen without replacement: the variance is less than that of independent choices by 1 - 0.15.
    statistic = stats.chisquare(counts[1:129]).statistic / 0.85
    assert LEAST_P < stats.chi2.sf(statistic, 127) < 1 - LEAST_P


@pytest.mark.parametrize("whole_words", [False, True])
def test_80_10_10(tokenizer: BertTokenizer, whole_words: bool) -> None:
    # One word only, so that what was drawn at random is told from what stayed, but for one in 80.
    found = mask(Masking(tokenizer, whole_words=whole_words), [[CLS, *[WORD] * 100, SEP]] * 2000)
    shown = found.input_ids[found.positions]
    words = VOCAB - len(SPECIAL)
    counts = [(shown == MASK).sum(), (shown == WORD).sum(), ((shown != MASK) & (shown != WORD)).sum()]
    shares = np.array([0.8, 0.1 + 0.1 / words, 0.1 * (words - 1) / words])
    assert stats.chisquare(counts, shares * sum(counts)).pvalue > LEAST_P
    drawn = np.bincount(shown[(shown != MASK) & (shown != WORD)], minlength=VOCAB)
    assert drawn[: len(SPECIAL)].sum() == 0
    assert stats.chisquare(drawn[WORD + 1 :]).pvalue > LEAST_P


def test_fates_do_not_depend_on_the_place_or_on_the_fate_before(tokenizer: BertTokenizer) -> None:
    found = mask(Masking(tokenizer, mask_probability=1.0), [[CLS, *[WORD] * 100, SEP]] * 1000)
    is_mask = (found.input_ids[found.positions] == MASK).reshape(1000, 100)
    assert stats.chi2_contingency(np.stack([is_mask.sum(0), (~is_mask).sum(0)])).pvalue > LEAST_P
    pairs = np.bincount((2 * is_mask[:, :-1] + is_mask[:, 1:]).ravel(), minlength=4).reshape(2, 2)
    assert stats.chi2_contingency(pairs).pvalue > LEAST_P


@pytest.mark.parametrize("whole_words", [False, True])
def test_an_example_is_masked_alike_in_any_batch(tokenizer: BertTokenizer, whole_words: bool) -> None:
    draw = np.random.default_rng(0)
    masking = Masking(tokenizer, whole_words=whole_words)
    sequences = [[CLS, *draw.integers(WORD, VOCAB, draw.integers(0, 60)).tolist(), SEP] for _ in range(40)]
    together = mask(masking, sequences)
    ends = np.cumsum([len(one) for one in sequences])
    order = draw.permutation(40)
    shuffled = mask(masking, [sequences[i] for i in order], order.tolist())
    for batch, numbers in ((together, np.arange(40)), (shuffled, order)):
        start = 0
        for number in numbers.tolist():
            stop = start + len(sequences[number])
            alone = mask(masking, [sequences[number]], [number])
            assert np.array_equal(batch.input_ids[start:stop], alone.input_ids)
            inside = (batch.positions >= start) & (batch.positions < stop)
            assert np.array_equal(batch.positions[inside] - start, alone.positions)
            start = stop
    assert ends[-1] == len(together.input_ids)


def test_an_example_is_masked_alike_in_batches_of_any_size(tokenizer: BertTokenizer) -> None:
    """So many that in some batches a sequence has fewer small random numbers than usual, and all are sorted."""
    masking = Masking(tokenizer)
    ids, lengths = np.tile(sentence(202), 20_000), 202
    for epoch in range(2):
        large = masking(ids, np.arange(20_001) * lengths, np.arange(20_000), 0, epoch)
        for start in range(0, 20_000, 4000):
            small = masking(ids[: 4000 * lengths], np.arange(4001) * lengths, start + np.arange(4000), 0, epoch)
            assert np.array_equal(small.input_ids, large.input_ids[start * lengths : (start + 4000) * lengths])


def test_epochs_seeds_and_examples_differ(tokenizer: BertTokenizer) -> None:
    masking, sequences = Masking(tokenizer), [sentence(100)] * 3
    first, second = mask(masking, sequences), mask(masking, sequences, epoch=1)
    assert not np.array_equal(first.input_ids, second.input_ids)
    by_sequence = {tuple(row) for row in first.input_ids.reshape(3, 100).tolist()}
    assert len(by_sequence) == 3
    other = masking(np.array(sentence(100)), np.array([0, 100]), np.array([0]), seed=2, epoch=0)
    assert not np.array_equal(other.input_ids, first.input_ids[:100])
    assert np.array_equal(mask(masking, sequences).input_ids, first.input_ids)


def test_special_tokens_are_left_alone_wherever_they_are(tokenizer: BertTokenizer) -> None:
    masking = Masking(tokenizer, mask_probability=1.0)
    sequence = [CLS, UNK, WORD, MASK, SEP, CLS, PAD, WORD + 1, SEP]
    found = mask(masking, [sequence] * 50)
    assert found.positions.tolist() == sorted(9 * i + place for i in range(50) for place in (2, 7))


def test_added_special_tokens_are_special() -> None:
    tokenizer = BertTokenizer([*SPECIAL, *WORDS])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    tokenizer.add_tokens(["plain"])
    special, plain = tokenizer.convert_tokens_to_ids(["<x>", "plain"])
    found = mask(Masking(tokenizer, mask_probability=1.0), [[CLS, special, plain, SEP]] * 9000)
    assert found.positions.tolist() == [4 * i + 2 for i in range(9000)]
    assert special not in found.input_ids[found.positions]
    assert set(range(WORD, WORD + len(WORDS))) < set(found.input_ids[found.positions].tolist())


def test_batches_with_nothing_to_mask(tokenizer: BertTokenizer) -> None:
    for whole_words, p in itertools.product([False, True], [0.15, 1.0]):
        masking = Masking(tokenizer, whole_words=whole_words, mask_probability=p)
        for sequences in ([], [[CLS, SEP]], [[CLS, UNK, SEP], [CLS, SEP]], [[]], [[], [SEP], []]):
            assert mask(masking, sequences).positions.tolist() == []
        found = mask(masking, [[], [CLS, SEP], [CLS, WORD, SEP], []])
        assert found.positions.tolist() == ([3] if p == 1.0 else found.positions.tolist()[:1])


def words_of(sequence: Sequence[int]) -> list[list[int]]:
    """Places of the tokens of each word, one token at a time."""
    words: list[list[int]] = []
    goes_on = False
    for place, token in enumerate(sequence):
        if token < WORD:
            goes_on = False
        elif token >= PIECE and goes_on:
            words[-1].append(place)
        else:
            words.append([place])
            goes_on = True
    return words


def test_whole_words(tokenizer: BertTokenizer) -> None:
    draw = np.random.default_rng(1)
    masking = Masking(tokenizer, mask_probability=0.3, whole_words=True)
    sequences = [draw.integers(0, VOCAB, draw.integers(0, 50)).tolist() for _ in range(300)]
    sequences += [[PIECE, PIECE + 1, WORD], [WORD, PIECE, PIECE], [PIECE], [WORD, PIECE]] * 10
    found = mask(masking, sequences)
    start = 0
    for sequence in sequences:
        inside = found.positions[(found.positions >= start) & (found.positions < start + len(sequence))] - start
        words = words_of(sequence)
        chosen = [word for word in words if word[0] in inside]
        assert sorted(itertools.chain.from_iterable(chosen)) == inside.tolist()
        assert len(chosen) in (int(0.3 * len(words)), int(0.3 * len(words)) + 1)
        start += len(sequence)


def test_whole_words_are_equally_likely_whatever_their_length(tokenizer: BertTokenizer) -> None:
    sequence = [CLS, WORD, PIECE, PIECE, WORD, WORD, PIECE, SEP]
    found = mask(Masking(tokenizer, mask_probability=1 / 3, whole_words=True), [sequence] * 6000)
    counts = [int((found.positions % 8 == place).sum()) for place in (1, 4, 5)]
    assert stats.chisquare(counts).pvalue > LEAST_P


def test_bad_arguments(tokenizer: BertTokenizer) -> None:
    for p in (0, -0.1, 1.01):
        with pytest.raises(ValueError, match="mask_probability: expected a number above 0, at most 1, got"):
            Masking(tokenizer, mask_probability=p)
    with pytest.raises(ValueError, match="mask_probability: expected a finite number, got nan"):
        Masking(tokenizer, mask_probability=float("nan"))
    with pytest.raises(TypeError, match="mask_probability: expected a number, got str"):
        Masking(tokenizer, mask_probability="0.15")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected words in the vocabulary, got special tokens only"):
        Masking(BertTokenizer(SPECIAL))
    long = np.full(65537, WORD)
    with pytest.raises(ValueError, match="of 65536 tokens, got 1 of up to 65537"):
        Masking(tokenizer)(long, np.array([0, 65537]), np.array([0]), 0, 0)
    found = Masking(tokenizer)(long[:-1], np.array([0, 65536]), np.array([0]), 0, 0)
    assert len(found.positions) in (9830, 9831) and found.positions[-1] > 65000
