"""Embedding models: raw text to vectors, contrastive steps, memory of large batches, beside sentence-transformers."""
