"""Whole models and training runs, ours beside transformers', and single pieces on a CPU."""
