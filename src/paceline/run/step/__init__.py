"""One worker's step: the loop, the replica, the plan and the update."""
