"""The averaging strategy: workers take local optimizer steps and average their parameters periodically."""
