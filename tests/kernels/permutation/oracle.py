"""The movement of rows in NumPy, one choice after another, in float64."""

from typing import Any

import numpy as np

from tilewright.kernels.permutation.routing import Routing


def routing_of(experts: Any, num_experts: int, capacity: int | None = None) -> Routing:
    """The routing of choices of experts that may be any integers."""
    experts = np.asarray(experts)
    ids = experts.ravel()
    held = [np.flatnonzero(ids == expert)[:capacity] for expert in range(num_experts)]
    order = np.concatenate(held)
    source, positions = np.full(ids.size, -1, np.int32), np.full(ids.size, -1, np.int32)
    source[: order.size] = order
    positions[order] = np.arange(order.size)
    sizes: Any = np.array([each.size for each in held], np.int32)
    return Routing(source, positions.reshape(experts.shape), sizes)  # type: ignore[arg-type]


def gathered(x: Any, routing: Routing, weights: Any = None) -> Any:
    k, rows = routing.positions.shape[1], np.zeros((len(routing.source), np.shape(x)[1]))
    for row, choice in enumerate(np.asarray(routing.source)):
        if choice >= 0:
            factor = 1.0 if weights is None else np.float64(weights[choice // k, choice % k])
            rows[row] = factor * np.asarray(x, np.float64)[choice // k]
    return rows


def terms(rows: Any, routing: Routing, bias: Any = None, experts: Any = None) -> Any:
    """``[tokens, k, d]``, zeros for dropped choices."""
    tokens, k = routing.positions.shape
    found = np.zeros((tokens, k, np.shape(rows)[1]))
    for token, j in np.ndindex(tokens, k):
        position = int(routing.positions[token, j])
        if position >= 0:
            found[token, j] = np.asarray(rows, np.float64)[position]
            if bias is not None:
                found[token, j] += np.asarray(bias, np.float64)[experts[token, j]]
    return found


def combined(rows: Any, routing: Routing, weights: Any = None, bias: Any = None, experts: Any = None) -> Any:
    is_kept = np.asarray(routing.positions) >= 0
    factors = is_kept * 1.0 if weights is None else np.where(is_kept, np.asarray(weights, np.float64), 0)
    return (factors[..., None] * terms(rows, routing, bias, experts)).sum(1)


def inner_products(y: Any, rows: Any, routing: Routing, bias: Any = None, experts: Any = None) -> Any:
    tokens = np.where(np.asarray(routing.positions)[..., None] >= 0, np.asarray(y, np.float64)[:, None], 0)
    return (tokens * terms(rows, routing, bias, experts)).sum(-1)
