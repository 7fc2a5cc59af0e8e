"""``tilewright info``."""


def info() -> None:
    """Show the device, the versions, and which backends of each op can be loaded, and if not why."""
    from tilewright.cli.info.inventory import print_inventory

    print_inventory()
