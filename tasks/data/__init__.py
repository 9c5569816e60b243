"""Read preference pairs and cut them into sets."""
