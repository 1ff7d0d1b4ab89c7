"""Pre-training and fine-tuning: tasks, the loop, checkpoints, and what a person sees of a run."""
