"""Entry point of ``python -m tilewright.cli``."""

from tilewright.cli.app import main

if __name__ == "__main__":
    main()
