"""`python -m benchmarks.plot`: stored results as pictures and one page."""
