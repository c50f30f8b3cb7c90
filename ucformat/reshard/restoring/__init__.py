"""What was read, put back into a live state. `load` calls it."""
