"""How long tests wait for other processes."""

# Only what hangs takes as long: on a busy machine, importing torch alone may take a minute.
PATIENCE_S = 600.0
