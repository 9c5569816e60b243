"""Do the steps of a run: pure cores and their thin shells."""
