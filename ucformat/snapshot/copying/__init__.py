"""Carries a copy plan out, on the host or on a device. The snapshotter starts it; it decides nothing."""
