"""Embedding models and cross-encoders beside sentence-transformers: contrastive steps, memory of large batches, scores."""
