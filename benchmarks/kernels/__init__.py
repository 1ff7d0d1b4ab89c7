"""One kernel case: what a family tells of it, whether it is right, how long it takes; what a device can reach."""
