"""Matrices: how shards of them meet on their owners, and become directions."""
