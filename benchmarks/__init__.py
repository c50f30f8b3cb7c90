"""Performance claims, one command each: `python -m benchmarks.NAME [--json]`."""
