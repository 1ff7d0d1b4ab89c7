"""Triton kernels, one family per file; imported by name through `bert_fast.backend` only."""
