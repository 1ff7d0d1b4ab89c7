"""The functional API."""
