"""The user's ``XLA_FLAGS``, as far as choices of ours follow them. Options of one ``jax.jit`` are not seen."""

import os


def flag(name: str) -> str:
    """The value of a flag, the last one if it is given again; "true" without one, and "" if it is not given."""
    found = ""
    for each in os.environ.get("XLA_FLAGS", "").split():
        given, separator, value = each.removeprefix("--").partition("=")
        if each.startswith("--") and given == name:
            found = value if separator else "true"
    return found


def permutes_by_copies() -> bool:
    """True if the devices of a process may exchange data by copies, which need none of their SMs."""
    return flag("xla_gpu_collective_permute_mode") == "peer"


def wants_repeatable() -> bool:
    """True if every run shall give the same bits."""
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    return any(flag(name).lower() in ("true", "1") for name in names)
