"""Configs that would be chosen if a compiler of minutes had made what they need: passed over, and said once."""

import logging
from collections.abc import Sequence
from typing import Any

from tilewright.ops.kernel.builds import Build, missing_builds
from tilewright.ops.kernel.kernel import Invocation, optional_method
from tilewright.ops.utils.describe import describe_config

logger = logging.getLogger("tilewright.ops.config.selection")

# Of which it was said that a call does without them.
_SAID: set[Build] = set()


def needed(inv: Invocation[Any, Any], cfg: Any) -> tuple[Build, ...]:
    """Builds that a config that can run the call needs, made or not."""
    builds = optional_method(inv.kernel, "config_builds")
    return () if builds is None else tuple(builds(inv, cfg))


def missing(inv: Invocation[Any, Any], cfg: Any) -> tuple[Build, ...]:
    """Builds for want of which a config that can run the call is passed over."""
    return missing_builds(needed(inv, cfg))


def say_once(
    inv: Invocation[Any, Any], chosen: Any, preferred: Any, builds: Sequence[Build], *, in_background: bool
) -> None:
    """Says of each build once that a call does without it; and has it made by another process if that is wanted."""
    fresh = [each for each in builds if each not in _SAID]
    _SAID.update(fresh)
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
        from tilewright.ops.tuning.builds.background import BackgroundBuilds  # starts processes

        background = BackgroundBuilds()
        background.add(fresh)
        background.leave()
