"""Campaigns: thousands of kills, damaged files, hostile inputs, I/O errors and races, each from a seed.

    python -m tests.campaigns --seconds 3600 --seed 1 [--only NAME]

A campaign is a function `trial(random) -> str`: "" when all went as promised, else what went wrong (see `tally`).
"""
