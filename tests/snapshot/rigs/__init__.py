"""What the tests of snapshots share: simulated devices, jobs of several ranks, slots and trainers."""
