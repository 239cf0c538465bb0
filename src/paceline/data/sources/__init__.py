"""A common interface to the formats of users' data."""
