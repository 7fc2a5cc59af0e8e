"""Background builds of a tuning, in separate processes."""
