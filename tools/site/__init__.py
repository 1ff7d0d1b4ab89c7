"""The documentation as a site: `make site`, or `python -m tools.site` in an environment with its requirements."""
