"""Benchmark and ahead-of-time cases, one op family per file; see `benchmarks/kernels/case.py`.

Importing this module imports no torch.
"""

from pathlib import Path

__all__ = ["family_names"]


def family_names() -> list[str]:
    """Op families with kernel cases."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
