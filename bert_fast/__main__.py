"""`python -m bert_fast`: the command line."""

from bert_fast.cli.main import command

command()
