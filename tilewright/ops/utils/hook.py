"""A function that a lower layer calls and a higher layer defines."""


class Hook[T]:
    """A slot for such a function.

    The defining layer fills the slot when it is imported. Python imports the package ``tilewright.ops``, which imports
    every layer, before any module in it, so no caller finds the slot empty.
    """

    def __init__(self, name: str):
        self._name = name
        self._filled: list[T] = []

    def fill(self, function: T) -> None:
        """Sets the function."""
        self._filled[:] = [function]

    @property
    def function(self) -> T:
        """The function that was set.

        Raises:
          RuntimeError: no function was set.
        """
        if not self._filled:
            raise RuntimeError(f"{self._name} is not there: import tilewright.ops")
        return self._filled[0]
