"""``python -m tilewright``: the same as ``tilewright``."""

from tilewright.cli import main

if __name__ == "__main__":
    main()
