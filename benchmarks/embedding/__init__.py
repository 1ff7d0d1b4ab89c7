"""Embedding models and cross-encoders beside sentence-transformers: steps, scores, memory of large batches."""
