"""The arguments and help of ``tilewright info``."""


def info() -> None:
    """Show the device, the versions, and the backends of each op: which can be loaded, and why others cannot."""
    from tilewright.cli.info.inventory import print_inventory

    print_inventory()
