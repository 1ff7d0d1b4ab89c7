"""What all benchmarks share: clocks and turns, results as JSON lines, goals, Markdown, BERT's sizes."""
