"""Programs for the maintainers of this repository; none of it is installed."""
