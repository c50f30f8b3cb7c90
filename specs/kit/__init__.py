"""The conformance kit: what writes its checkpoints and attacks, and the table of clauses; `python -m specs.kit` does."""
