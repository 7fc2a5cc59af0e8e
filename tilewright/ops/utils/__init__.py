"""Utilities that depend on no other layer: config dataclasses, serialisation, fingerprints, devices."""
