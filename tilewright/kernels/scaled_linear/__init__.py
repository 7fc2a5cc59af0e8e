"""Linear layers that train in eight bits."""
