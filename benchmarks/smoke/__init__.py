"""`make gpu-smoke`: every kernel once on a GPU, within 90 seconds. docs/benchmarks.md says what is run and stored."""
