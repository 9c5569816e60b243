"""Run GPU jobs, each in a process group of its own."""
