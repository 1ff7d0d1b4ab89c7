"""The one place of the version number; `pyproject.toml` and `CMakeLists.txt` read it from this file without importing it."""

__version__ = "0.1.0"
