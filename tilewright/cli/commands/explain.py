"""The arguments and help of ``tilewright explain``."""

from tilewright.cli import options


@options.takes_call_options
def explain(
    target: options.Target,
    *,
    call: options.CallOptions,
    device: options.Device = None,
) -> None:
    """Show which config every kernel call would run with, where it comes from, and why no other. Measures nothing."""
    from tilewright.cli.explaining import explain_and_print

    explain_and_print(target, call, device)
