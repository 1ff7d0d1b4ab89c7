"""Are the random bits behind dropout fair and independent? With generators that are not, which must be found out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bert_fast import backend, native, ops
from bert_fast.reference.dropout import (
    HEAD_STRIDE,
    _random_values,
    attention_keep_mask,
    dropout_threshold,
    keep_mask,
)
from bert_fast.testing.randomness import agreement, bit_agreement, bit_bias, byte_chi_square, mask_bias
from bert_fast.testing.tolerances import ABSOLUTE

ONE, MANY = ABSOLUTE["one_random_figure"], ABSOLUTE["largest_of_many_random_figures"]
SEEDS = (1, -(2**62) - 12345)
BLOCKS = 40  # of 8 columns

# (seed, site, row, position of the first of 96 tokens, first block of columns) -> 16-bit values [96, 8 * BLOCKS]
Generator = Callable[[int, int, int, int, int], Tensor]


def philox(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    tokens = torch.arange(96, dtype=torch.int32)
    coords = torch.stack([row + tokens // 12, position + tokens % 12], dim=1)
    return _random_values(torch.tensor([seed]), site, coords, block + torch.arange(BLOCKS))


def constant(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    return torch.full((96, 8 * BLOCKS), 0x5A5A)


def counting(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    """Every value equally often, and every bit: neighbours tell one another."""
    index = torch.arange(96 * 8 * BLOCKS) + block * 8 + seed % 7 + site * 31 + row * 1009 + position * 10007
    return index.view(96, -1) % 65536


def halves_repeat(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    """Only four of the eight values of a block are drawn."""
    values = philox(seed, site, row, position, block).view(96, BLOCKS, 2, 4)
    return values[:, :, :1].expand(-1, -1, 2, -1).reshape(96, -1)


def half_the_bits(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    """The lower byte is the upper one again: each bit is fair."""
    values = philox(seed, site, row, position, block)
    return values & 0xFF00 | values >> 8


def bytes_of_few_values(seed: int, site: int, row: int, position: int, block: int) -> Tensor:
    """Bit 1 repeats bit 0: each bit is fair, half of the bytes never come."""
    values = philox(seed, site, row, position, block)
    return values & ~2 | (values & 1) << 1


def deaf_to(argument: int) -> Generator:
    def generator(*names: int) -> Tensor:
        return philox(*(0 if index == argument else name for index, name in enumerate(names)))

    return generator


def every_other_bit_of(argument: int) -> Generator:
    """Odd columns do not follow an argument."""

    def generator(*names: int) -> Tensor:
        values, stuck = philox(*names), deaf_to(argument)(*names)
        return torch.where(torch.arange(values.shape[1]) % 2 == 0, values, stuck)

    return generator


BASE = (7, 3, 5, 2, 0)
CHANGES = {
    "seed + 1": (8, 3, 5, 2, 0),
    "seed + 2**32": (7 + 2**32, 3, 5, 2, 0),
    "next site": (7, 4, 5, 2, 0),
    "same place, next layer": (7, 11, 5, 2, 0),
    "row far away": (7, 3, 5 + 10_000, 2, 0),
    "position far away": (7, 3, 5, 2 + 10_000, 0),
    "next head": (7, 3, 5, 2, HEAD_STRIDE // 8),
    "row and position exchanged": (7, 3, 2, 5, 0),
}


def check_fair(generator: Generator) -> None:
    for seed in SEEDS:
        values = generator(seed, 3, 5, 2, 0)
        assert bit_bias(values) < MANY, "a bit is not fair"
        assert byte_chi_square(values) < MANY, "bytes do not come equally often"
        for lane in range(8):  # the place in a block decides which half of which word a value is
            assert bit_bias(values[:, lane::8]) < MANY, f"a bit of lane {lane} is not fair"


def check_independent_neighbours(generator: Generator) -> None:
    values = generator(*BASE)
    for distance in range(1, 17):
        figure = bit_agreement(values[:, distance:], values[:, :-distance])
        assert figure < MANY, f"columns {distance} apart are related: {figure:.1f}"
    by_name = values.view(8, 12, -1)
    assert bit_agreement(by_name[1:], by_name[:-1]) < MANY, "neighbouring rows are related"
    assert bit_agreement(by_name[:, 1:], by_name[:, :-1]) < MANY, "neighbouring positions are related"
    for low in range(16):
        for high in range(low):
            bits = [(values >> bit & 1).bool() for bit in (low, high)]
            assert agreement(*bits) < MANY, f"bits {high} and {low} of a value are related"


def check_changes_change_everything(generator: Generator) -> None:
    values = generator(*BASE)
    for name, names in CHANGES.items():
        if "exchanged" in name:  # the tokens that bear both names
            base, other = values[:1], generator(*names)[:1]
        else:
            base, other = values, generator(*names)
        figure = bit_agreement(base, other)
        assert figure < MANY, f"{name}: related to what it was: {figure:.1f}"


CHECKS = (check_fair, check_independent_neighbours, check_changes_change_everything)


@pytest.mark.parametrize("check", CHECKS)
def test_bits_of_the_reference(check: Callable[[Generator], None]) -> None:
    check(philox)


@pytest.mark.parametrize(
    ("generator", "check"),
    [
        (constant, check_fair),
        (bytes_of_few_values, check_fair),
        (counting, check_independent_neighbours),
        (halves_repeat, check_independent_neighbours),
        (half_the_bits, check_independent_neighbours),
        (constant, check_changes_change_everything),
        *((deaf_to(argument), check_changes_change_everything) for argument in range(5)),
        *((every_other_bit_of(argument), check_changes_change_everything) for argument in range(5)),
    ],
)
def test_bad_generators_are_found_out(generator: Generator, check: Callable[[Generator], None]) -> None:
    with pytest.raises(AssertionError, match=r"related|not fair|equally often"):
        check(generator)


def coords_of(tokens: int) -> Tensor:
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack([index // 64, index % 64], dim=1)


def mask_of(name: str, seed: int, p: float, site: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """bool [512, 264] as an op drops it."""
    ones = torch.ones(512, 264, dtype=dtype)
    y = ops.dropout(ones, p, seed=torch.tensor([seed]), coords=coords_of(512), site=site, backend=name)
    return y != 0


HELD = [one.backend for one in backend.implementations("dropout") if one.backend != "triton"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("p", [2**-10, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", HELD)
def test_masks_drop_as_often_as_asked(name: str, p: float, dtype: torch.dtype) -> None:
    for seed in SEEDS:
        keep = mask_of(name, seed, p, dtype=dtype)
        assert mask_bias(keep, p) < ONE
        assert torch.equal(keep, keep_mask(torch.tensor([seed]), 3, coords_of(512), 264, p))


def test_a_wrong_probability_is_found_out() -> None:
    keep = mask_of("reference", 1, 0.1)
    assert mask_bias(keep, 0.11) > ONE and mask_bias(keep, 0.09) > ONE
    assert mask_bias(torch.ones_like(keep), 0.1) > ONE


@pytest.mark.parametrize("name", HELD)
def test_two_seeds_and_two_sites_draw_unrelated_masks(name: str) -> None:
    masks = [mask_of(name, seed, 0.5, site) for seed in (1, 2, 1 + 2**32, -1) for site in (3, 4)]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert agreement(first, second) < MANY
    assert agreement(masks[0], mask_of(name, 1, 0.5)) > MANY  # the same names draw the same mask


def test_without_the_extension_masks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mask_of("torch", 9, 0.3)
    monkeypatch.setattr(native, "load", lambda: None)
    assert torch.equal(mask_of("torch", 9, 0.3), expected)


def attention_mask_of(seed: int, site: int, p: float, row: int = 0) -> Tensor:
    """bool [4 heads, 64 queries, 288 keys]: 9 groups of 32 keys."""
    index = torch.arange(64, dtype=torch.int32)
    coords = torch.stack([torch.full_like(index, row), index], dim=1)
    return attention_keep_mask(torch.tensor([seed]), site, coords, 288, 4, p)


def check_independent_probabilities(mask: Callable[..., Tensor]) -> None:
    keep = mask(4, 1, 0.5)
    assert mask_bias(keep, 0.5) < MANY, "not fair"
    for key in range(32):  # its place in a group decides which part of which block a key is given
        assert mask_bias(keep[:, :, key::32], 0.5) < MANY, f"place {key} is not fair"
    for distance in range(1, 65):
        figure = agreement(keep[:, :, distance:], keep[:, :, :-distance])
        assert figure < MANY, f"keys {distance} apart are related: {figure:.1f}"
    groups = keep.unflatten(-1, (9, 32))
    for first in range(32):
        for second in range(first):
            figure = agreement(groups[..., first], groups[..., second])
            assert figure < MANY, f"places {second} and {first} of a group are related: {figure:.1f}"
    assert agreement(keep[:, 1:], keep[:, :-1]) < MANY, "neighbouring queries are related"
    for head in range(1, 4):
        assert agreement(keep[head], keep[head - 1]) < MANY, "neighbouring heads are related"
    for other in (mask(5, 1, 0.5), mask(4 + 2**32, 1, 0.5), mask(4, 2, 0.5), mask(4, 1, 0.5, row=1)):
        assert agreement(keep, other) < MANY, "masks of another seed, site or row are related"


def test_attention_probabilities() -> None:
    check_independent_probabilities(attention_mask_of)
    for p in (2**-10, 0.1, 0.9):
        assert mask_bias(attention_mask_of(4, 1, p), p) < ONE


def test_attention_probabilities_share_no_bits() -> None:
    """Every 16-bit value of the blocks of a group is that of one key: their masks are the same set of bits."""
    index = torch.arange(64, dtype=torch.int32)
    coords, seed = torch.stack([index * 0, index], dim=1), torch.tensor([4])
    values = _random_values(seed, 1, coords, HEAD_STRIDE // 8 + torch.arange(36))  # of the second head
    for p in (0.1, 0.5):
        keep = attention_mask_of(4, 1, p)[1]
        in_blocks = values >= dropout_threshold(p)
        assert torch.equal(keep.view(64, 9, 32).sum(-1), in_blocks.view(64, 9, 32).sum(-1))
        assert torch.equal(keep[:, [0, 1, 8, 9, 16, 17, 24, 25]], in_blocks[:, :8])  # the example of the definition


def repeated_key(*names: int | float, **more: int) -> Tensor:
    """The second key of each pair is the first one's copy."""
    return attention_mask_of(*names, **more)[:, :, ::2].repeat_interleave(2, -1)


def repeated_block(*names: int | float, **more: int) -> Tensor:
    """All four blocks of a group are the first one."""
    pairs = attention_mask_of(*names, **more).unflatten(-1, (9, 4, 4, 2))
    return pairs[:, :, :, :, :1].expand(-1, -1, -1, -1, 4, -1).flatten(2)


def repeated_group(*names: int | float, **more: int) -> Tensor:
    return attention_mask_of(*names, **more)[:, :, :32].repeat(1, 1, 9)


def repeated_head(*names: int | float, **more: int) -> Tensor:
    return attention_mask_of(*names, **more)[:1].expand(4, -1, -1)


def repeated_query(*names: int | float, **more: int) -> Tensor:
    return attention_mask_of(*names, **more)[:, ::2].repeat_interleave(2, 1)


def one_site(seed: int, site: int, p: float, row: int = 0) -> Tensor:
    return attention_mask_of(seed, 1, p, row)


def one_row(seed: int, site: int, p: float, row: int = 0) -> Tensor:
    return attention_mask_of(seed, site, p)


def low_half_of_the_seed(seed: int, site: int, p: float, row: int = 0) -> Tensor:
    return attention_mask_of(seed % 2**32, site, p, row)


@pytest.mark.parametrize(
    "mask",
    [
        repeated_key,
        repeated_block,
        repeated_group,
        repeated_head,
        repeated_query,
        one_site,
        one_row,
        low_half_of_the_seed,
    ],
)
def test_bad_masks_of_probabilities_are_found_out(mask: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"related|not fair"):
        check_independent_probabilities(mask)
