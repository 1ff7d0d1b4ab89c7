"""`python -m benchmarks.aot`: what every Triton kernel compiles to, on a machine without a GPU."""
