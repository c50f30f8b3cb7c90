"""Functions on catalogs: plan, read, cut for layouts, convert, compare, verify; collect live state and load into it."""
