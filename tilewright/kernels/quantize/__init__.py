"""Arrays in eight bits with scales, and the op that makes them."""
