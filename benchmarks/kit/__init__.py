"""What all benchmarks share: clocks, the command of a study, results as JSON lines, goals, Markdown, BERT's sizes."""
