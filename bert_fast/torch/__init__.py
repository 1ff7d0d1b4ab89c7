"""Back-end "torch": every op composed from PyTorch's own fast operators; the default on CPU."""
