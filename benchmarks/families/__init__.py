"""Benchmark and ahead-of-time cases, one op family per file; see `benchmarks/kernels/case.py`."""
