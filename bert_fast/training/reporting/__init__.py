"""What a person sees of a run: progress, curves, a page, and a directory that explains itself."""
