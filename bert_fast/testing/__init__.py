"""Tolerances, comparisons, shapes and inputs, for tests and benchmarks only."""
