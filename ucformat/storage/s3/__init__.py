"""S3 by its own client: requests are tried again, uploads go in parallel parts, commits are conditional writes."""
