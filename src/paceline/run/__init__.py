"""One worker's run: replica, loop, launch."""
