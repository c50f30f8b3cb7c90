"""Which bytes go into which idle window. Pure: no clock, no device, no file."""
