"""Figures as people read them: few digits, a unit, no more than fits a line."""

import math
from collections.abc import Mapping, Sequence

__all__ = ["count", "duration", "losses", "memory", "number", "numbered", "percent", "power", "rate"]

_SHOWN_NAMES = 20


def number(value: float) -> str:
    """A loss, a metric or a learning rate in about four digits: 0.4213, 12.38, 3e-05, nan."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and abs(value) < 1e-3:
        return power(value)
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def numbered(names: Sequence[str]) -> str:
    """Names of classes behind their numbers: 0 'negative', 1 'positive'; of many the first."""
    shown = [f"{place} {name!r}" for place, name in enumerate(names[:_SHOWN_NAMES])]
    return ", ".join(shown) + (f", ... ({len(names):,} in all)" if len(names) > _SHOWN_NAMES else "")


def power(value: float) -> str:
    """A small number in three digits: 3e-5, 1.25e-3, 0."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if value else "0"


def count(value: float) -> str:
    """A number of things in three digits: 950, 12.4k, 3.21M."""
    for limit, divisor, unit in ((999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (999.5e9, 1e9, "G")):
        if 999.5 <= value < limit:
            scaled = value / divisor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if value < 999.5 else f"{value:.2e}"


def rate(per_second: float) -> str:
    """Tokens a second."""
    return f"{count(per_second)} tokens/s"


def percent(share: float) -> str:
    """0.4567 as 45.7 %."""
    return f"{100 * share:.1f} %" if share < 0.9995 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """48 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def memory(num_bytes: float) -> str:
    """In units of 1000: 812 MB, 3.2 GB."""
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 999.5e6 else f"{num_bytes / 1e9:.1f} GB"


def losses(values: Mapping[str, float]) -> tuple[str, str]:
    """The loss, and in brackets its parts where there are several (else ""): ("loss 2.5", "(masked_lm 2.2, ...)")."""
    parts = {name: value for name, value in values.items() if name != "loss"}
    text = f"loss {number(values['loss'] if 'loss' in values else sum(parts.values()))}"
    if len(parts) < 2:
        return text, ""
    return text, f"({', '.join(f'{name} {number(value)}' for name, value in parts.items())})"
