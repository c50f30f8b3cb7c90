"""An S3 server for tests, and what can go wrong on the way to it."""
