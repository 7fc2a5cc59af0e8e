"""Adapters to other libraries' interfaces; each module is imported by its users alone, never by the package."""
