"""The layer of experts: its public function."""

from typing import Any

import jax

from tilewright.kernels.experts.layer import MOE_MLP
from tilewright.kernels.experts.layer import MoeMlp as MoeMlp
from tilewright.kernels.experts.parallel import EXPERT_PARALLEL_MLP, ExpertParallelMlp, on_explicit_axes
from tilewright.kernels.op.public import public_function

_NAMES = ("x", "weights", "experts", "gate", "up", "down")


@public_function(ExpertParallelMlp.prepare)
def moe_mlp(*args: Any, **kwargs: Any) -> jax.Array:
    """The layer of a mixture of experts: tokens to their experts, a gated MLP for each, and the weighted sums.

    ``out[t] = Σ_j weights[t, j] · (act(x[t] · gate[e]) * (x[t] · up[e])) · down[e]`` with ``e = experts[t, j]``. Rows
    are sorted by expert, so no array has a dimension of tokens and one of experts. Sums are in float32 (float64 for
    float64), in one order: results and gradients repeat bit for bit. The backward pass needs x, both pre-activations,
    ``[tokens · k, n]`` in the dtype of the result, and the order of the rows.

    Args:
      x: ``[..., d]``, floating-point: the tokens.
      weights: ``[..., k]``, floating-point: those of the choices, such as ``top_k_router`` gives; used in float32.
      experts: ``[..., k]`` integers: the choices. One outside of ``[0, number of experts)`` is dropped: it adds
        nothing to its token, and its weight has no gradient.
      gate, up: ``[experts, d, n]``.
      down: ``[experts, n, d]``.
      activation: as in ``glu``; or "swiglu_oai", gpt-oss's ``g · sigmoid(1.702 g) · (u + 1)`` with g at most 7 and u
        between -7 and 7.
      biases: ``(gate, up, down)``, of ``[experts, n]`` twice and ``[experts, d]``, or None for one; they are added
        before the activation, and before the weights.
      capacity: the most rows of an expert. Of more choices the first ones are kept, in the order of tokens and of the
        choices of a token, and the others are dropped. None drops none.
      axis_name: inside ``shard_map`` the mesh axis, or several, over which the experts are split: each device passes
        its own tokens and its own experts' matrices and biases; ids count the experts of all devices. No token is
        dropped, and the result is that of one device with all tokens and experts, but for rounding.
      strategy: "all_gather" brings the tokens of all devices to each, which computes what its experts add to them, in
        the dtype of the result, and sums of these are in float32. "auto" takes the best plan.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., d]``, in the dtype of x and the matrices.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    if kwargs.get("axis_name") is not None:
        return EXPERT_PARALLEL_MLP(*args, **kwargs)
    strategy = kwargs.pop("strategy", "auto")
    kwargs.pop("axis_name", None)
    given = dict(zip(_NAMES, args, strict=False)) | {name: kwargs[name] for name in _NAMES if name in kwargs}
    options = {name: value for name, value in kwargs.items() if name not in _NAMES}
    found = on_explicit_axes(given, options | {"strategy": strategy})
    if found is None and strategy != "auto":
        raise ValueError(f"{strategy=} needs experts that are split: axis_name, or matrices on explicit mesh axes")
    return MOE_MLP(*args, **kwargs) if found is None else found
