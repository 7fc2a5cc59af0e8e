"""Writing into pages."""
