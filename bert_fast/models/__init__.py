"""Configuration, encoder, task models, checkpoints."""
