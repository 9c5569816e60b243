"""Hold the domain: prompts, verdicts, votes, statistics."""
