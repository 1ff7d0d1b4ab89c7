"""A CUDA driver that runs nothing, and what can be counted over it: docs/null_driver.md."""
