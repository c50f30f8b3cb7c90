"""What of a catalog goes over, and how the output is cut. `convert` and `diff` call it."""
