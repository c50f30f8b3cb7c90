"""What is copied, and where it lies now in the live state. The snapshotter calls it at each step."""
