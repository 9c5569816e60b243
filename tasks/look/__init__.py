"""Look into what a run committed: rows, lineage, comparisons and SQL; nothing here writes."""
