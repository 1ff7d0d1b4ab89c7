"""The one place of the version number; `pyproject.toml` and `CMakeLists.txt` read it from this text."""

__version__ = "0.1.0"
