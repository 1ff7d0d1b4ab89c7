"""`python -m benchmarks.gemm_tuning`: our matrix products beside the library's; tables of the fastest tiles."""
