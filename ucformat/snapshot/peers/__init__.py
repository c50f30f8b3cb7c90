"""Slots of other hosts: their byte ranges, served over TCP to members of the same job, and read as a `Store`."""
