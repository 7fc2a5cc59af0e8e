"""Adapters to other libraries' interfaces; each module is imported only by its users, never by the package."""
