"""Other projects' own tests, run on transformers as it is and with every model fused: `python -m tools.outer_tests`."""
