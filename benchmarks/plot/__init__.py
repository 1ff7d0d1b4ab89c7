"""`python -m benchmarks.plot`: stored results as one page of pictures and tables."""
