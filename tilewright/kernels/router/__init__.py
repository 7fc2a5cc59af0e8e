"""The router of a mixture of experts: its choice, its weights and losses, and its backends."""
