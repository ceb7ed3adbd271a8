"""What is of matrices alone: how shards of them meet on their owners, and become directions."""
