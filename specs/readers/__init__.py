"""Readers made from the text of the specification alone."""
