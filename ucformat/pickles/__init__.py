"""Pickles are read here, never run: tensors become byte ranges, values plain values, all else inert stand-ins."""
