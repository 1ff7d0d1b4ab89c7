"""Embedding models: contrastive steps and memory of large batches, beside sentence-transformers."""
