"""The Python face of the C++ WordPiece core."""
