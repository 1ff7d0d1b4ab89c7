"""Random numbers that are a pure function of a key and of counters, on the host.

    draws = CounterRandom(seed, epoch, "masking")
    draws.uniform(example, place)  # the same for this example and place in any process, batch or order

A key of integers and words is folded into 64 bits; each counter is then mixed in by one round of SplitMix64: a step of
the golden ratio and a bijection of 64 bits whose every output bit depends on every input bit. About 4 ns a number.

Source: Steele, Lea and Flood 2014 (doi:10.1145/2660193.2660195), with the constants of its mixing function "variant 13"
by Stafford.
"""

import hashlib
from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class CounterRandom:
    """A family of random numbers, one for each tuple of counters; families of different keys are independent.

    key: integers (any sign) and words, as (seed, epoch, "masking"); their order counts.

    Counters are integers or arrays of them (int64 or uint64, from 0) that broadcast against each other; results have
    their shape. The same key and counters give the same numbers on every machine and with every version of NumPy.
    """

    def __init__(self, *key: int | str) -> None:
        parts = [str(part).encode() if isinstance(part, str) else b"%d" % part for part in key]
        kinds = "".join("s" if isinstance(part, str) else "i" for part in key).encode()
        text = b"\0".join([kinds, *(b"%d:%s" % (len(part), part) for part in parts)])
        self._state = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def bits(self, *counters: Any) -> np.ndarray:
        """64 random bits for each tuple of counters: uint64."""
        mixed = np.array(self._state, dtype=np.uint64)
        with np.errstate(over="ignore"):  # NumPy warns of wrapped scalars, though not of arrays
            for counter in counters:
                steps = (np.asarray(counter).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
                mixed = _mixed(np.asarray(mixed + steps))
        return mixed

    def uniform(self, *counters: Any) -> np.ndarray:
        """Numbers from 0 to below 1, multiples of 2^-53: float64."""
        return (self.bits(*counters) >> np.uint64(11)) * 2.0**-53

    def integers(self, bound: Any, *counters: Any) -> np.ndarray:
        """Integers from 0 to below `bound` (an integer or an array of them, 1 to 2^32): int64.

        Some are more likely than others by a share of at most bound / 2^32.
        """
        return below(bound, self.bits(*counters))

    def permutation(self, count: int) -> np.ndarray:
        """The numbers 0 to count - 1 in random order: int64 [count]."""
        return np.argsort(self.bits(np.arange(count)), kind="stable")


def below(bound: Any, bits: np.ndarray) -> np.ndarray:
    """Random bits (uint64) as integers from 0 to below `bound`, as in `CounterRandom.integers`: int64."""
    high = bits >> np.uint64(32)
    return np.asarray((high * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's bijection of 64 bits, in place."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
