"""Reports, once each, preferred configs that are skipped because nvcc, which takes minutes, has not built them yet."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.ops.kernel.builds import Build, missing_builds
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.describe import describe_config
from tilewright.ops.utils.hook import Hook

logger = logging.getLogger("tilewright.ops.config.selection")

BUILD_IN_BACKGROUND: Hook[Callable[[Sequence[Build]], None]] = Hook("the process that makes builds")
"""Starts builds in another process, which outlives this one."""

# Builds whose absence was already reported.
_REPORTED: set[Build] = set()


def missing(inv: Invocation[Any, Any], cfg: object) -> tuple[Build, ...]:
    """The missing builds that make a config be skipped."""
    return missing_builds(inv.kernel.config_builds(inv, cfg))


def report_once(
    inv: Invocation[Any, Any], chosen: object, preferred: object, builds: Sequence[Build], *, in_background: bool
) -> None:
    """Reports each missing build once, and starts building it in another process if ``in_background``."""
    fresh = [each for each in builds if each not in _REPORTED]
    _REPORTED.update(fresh)
    if not fresh:
        return
    commands = " and ".join(dict.fromkeys(f"`{each.command(inv.kernel.name)}`" for each in builds))
    instead = (
        "it is being compiled in the background, for later programs"
        if in_background
        else f"run {commands} once, tune the call, or install tilewright-kernels"
    )
    logger.warning(
        "%s %s would run by %s, but nvcc must compile that first, which takes minutes (%s): %s. It runs by %s",
        inv.kernel.name, inv.direction, describe_config(preferred), ", ".join(map(str, builds)), instead,
        describe_config(chosen),
    )  # fmt: skip
    if in_background:
        BUILD_IN_BACKGROUND.function(fresh)
