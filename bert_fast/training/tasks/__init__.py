"""The tasks: data, loss, metrics and predictions of one kind of run each."""
