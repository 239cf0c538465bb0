"""Workers of one host: sums in memory that all of them map."""
