"""Write completions: vLLM, and a scripted engine."""
