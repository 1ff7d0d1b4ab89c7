"""Benchmarks: `python -m benchmarks.run` times the cases of `registry.py` and appends to `results/`."""
