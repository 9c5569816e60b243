"""Describe a run: typed sections, loading, checks, presets."""
