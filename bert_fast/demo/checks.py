"""What the demo claims, with the number behind it."""

from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """One claim: what is compared, what was found, what would do, and whether it does."""

    name: str
    found: str
    expected: str
    passed: bool

    @classmethod
    def at_most(cls, name: str, value: float, limit: float) -> "Check":
        """A difference that must not exceed a limit; NaN fails."""
        return cls(name, f"{value:.2g}", f"≤ {limit:.0e}", value <= limit)
