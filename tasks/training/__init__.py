"""Train the next checkpoint with TRL."""
