"""A function that an earlier layer calls and a later one defines."""


class Hook[T]:
    """The place of such a function.

    The later layer fills it when it is imported. ``tilewright.ops`` imports every layer, and Python imports that before
    any module in it, so that nobody finds it empty.
    """

    def __init__(self, name: str):
        self._name = name
        self._filled: list[T] = []

    def fill(self, function: T) -> None:
        """Puts the function in its place."""
        self._filled[:] = [function]

    @property
    def function(self) -> T:
        """The function.

        Raises:
          RuntimeError: nothing has filled the place.
        """
        if not self._filled:
            raise RuntimeError(f"{self._name} is not there: import tilewright.ops")
        return self._filled[0]
