"""The result of a tuning for an implementation that was not chosen."""

from collections.abc import Sequence
from typing import Any


def measured_result(name: str, measured: Sequence[Any], chosen: object) -> str:
    """The result of one implementation's candidates in a tuning, relative to the chosen one; empty without any."""
    candidates = [each for each in measured if each.config.implementation == name]
    if not candidates:
        return ""
    chosen_ms = next((each.time_ms for each in measured if each.config == chosen and each.eligible), None)
    times = [each.time_ms for each in candidates if each.eligible]
    if not times:
        failed = [each for each in candidates if not each.dropped]
        how = f"every candidate failed: {failed[0].error}" if failed else f"not measured: {candidates[0].error}"
        return f"supported, but {how}"
    distance = "" if not chosen_ms else f", {min(times) / chosen_ms:.3g} times the chosen one's"
    return f"supported, and measured at {min(times):.4g} ms at best{distance}"
