"""Entry points: thin layers over the engine."""
