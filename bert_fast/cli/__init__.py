"""The command line: `bert-fast`."""
