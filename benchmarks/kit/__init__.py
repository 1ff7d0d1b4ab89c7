"""What all benchmarks share: clocks, the command of a study, results as JSON lines, Markdown, BERT's sizes."""
