"""Restoring from the memory of several hosts: who holds what, which version that makes, and where its files lie."""
