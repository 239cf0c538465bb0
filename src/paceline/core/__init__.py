"""What every layer may know: the world, seeds, errors."""
