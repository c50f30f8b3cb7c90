"""The verbs on catalogs (save, load, convert, diff, verify) and the rooms they use. Called by `api`, `snapshot` and `cli`."""
