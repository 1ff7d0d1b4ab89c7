"""Whole runs from plain settings: what the command line calls, and what a script may call as well."""
