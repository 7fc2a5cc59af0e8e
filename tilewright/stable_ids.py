"""Loads the classes of this package that files name by id (see ``ops.utils.stable_ids``)."""


def load(name: str) -> None:
    """Imports what defines the class of an id or of a former name; nothing if there is none."""
    from tilewright.compat import base as base
    from tilewright.kernels import load_classes

    load_classes(name)
