"""Runs the PTX that Triton makes of our kernels, on a CPU: see docs/witness.md."""
