"""What bytes look like inside files: safetensors headers, zip entries, block checksums. Formats use it; it knows no format."""
