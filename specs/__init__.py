"""The format: normative text, and its schema (`python -m specs.generate` writes it)."""
