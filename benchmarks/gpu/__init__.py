"""`python -m benchmarks.gpu`: all that a GPU is needed for, in parts with budgets. Imports neither torch nor triton."""
