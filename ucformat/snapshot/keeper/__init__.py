"""The helper process that hashes and persists versions. Trainers talk to it through `client` alone."""
