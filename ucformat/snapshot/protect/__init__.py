"""Making parity of every version beside training: a process per rank that serves its host's slots and reads its group's."""
