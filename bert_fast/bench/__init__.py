"""`bert-fast bench`: transformers' models before and after `fuse`, timed on the machine at hand, and drawn."""
