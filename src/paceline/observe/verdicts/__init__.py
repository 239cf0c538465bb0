"""What holds a run back, from what it logged: pure functions, and one module that reads a run's folder."""
