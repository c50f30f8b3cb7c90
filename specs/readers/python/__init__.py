"""A reader in one file: `ucf_reader.py` can be copied and used by itself."""
