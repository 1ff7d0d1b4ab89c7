import torch

from bert_fast.demo.masking import IGNORE_INDEX, mask_tokens

MASK_ID, VOCAB_SIZE = 103, 30522


def make(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, VOCAB_SIZE, (4, count), generator=generator)
    maskable = torch.rand(ids.shape, generator=generator) < 0.9
    return ids, maskable, *mask_tokens(ids, maskable, MASK_ID, VOCAB_SIZE, generator)


def test_shares() -> None:
    ids, maskable, masked, labels = make(50_000)
    chosen = labels != IGNORE_INDEX
    total, picked = int(maskable.sum()), int(chosen.sum())

    def is_near(count: int, out_of: int, share: float) -> bool:
        """Within five standard deviations of a binomial variable."""
        return abs(count - share * out_of) < 5 * (out_of * share * (1 - share)) ** 0.5

    assert is_near(picked, total, 0.15)
    is_mask, is_same = masked[chosen] == MASK_ID, masked[chosen] == ids[chosen]
    assert is_near(int(is_mask.sum()), picked, 0.8)
    assert is_near(int(is_same.sum()), picked, 0.1)
    drawn = masked[chosen][~is_mask & ~is_same]
    assert is_near(len(drawn), picked, 0.1)
    # from the whole vocabulary, evenly
    assert is_near(int((drawn < VOCAB_SIZE // 2).sum()), len(drawn), 0.5)


def test_only_chosen_tokens_change_and_labels_tell_what_they_were() -> None:
    ids, maskable, masked, labels = make(1000)
    chosen = labels != IGNORE_INDEX
    assert torch.equal(masked[~chosen], ids[~chosen])
    assert torch.equal(labels[chosen], ids[chosen])
    assert not (chosen & ~maskable).any()


def test_the_generator_decides() -> None:
    assert torch.equal(make(100, seed=1)[2], make(100, seed=1)[2])
    assert not torch.equal(make(100, seed=1)[2], make(100, seed=2)[2])


def test_nothing_maskable() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    masked, labels = mask_tokens(ids, torch.zeros(2, 3, dtype=torch.bool), 0, 10, torch.Generator())
    assert torch.equal(masked, ids)
    assert (labels == IGNORE_INDEX).all()
