"""The arguments and help of ``tilewright explain``."""

from tilewright.cli import options


def explain(
    target: options.Target,
    shape: options.Shape = None,
    case: options.Cases = None,
    kv_heads: options.KvHeads = None,
    kv_length: options.KvLength = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    extra: options.Extra = None,
    shapes: options.Shapes = None,
    backward: options.Backward = True,
    device: options.Device = None,
) -> None:
    """Show which config every kernel call would run with, where it comes from, and why no other. Measures nothing."""
    call = options.CallOptions(
        shape, tuple(case or ()), kv_heads, kv_length, causal, dtype, tuple(extra or ()), shapes, backward
    )
    from tilewright.cli.explaining import explain_and_print

    explain_and_print(target, call, device)
