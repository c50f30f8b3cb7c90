"""Versions in shared memory: slots, their records, locks, and which one all ranks have. Knows nothing of copying."""
