"""A gated linear unit and its gradients by their definition, in NumPy and float64."""

import math
from typing import Any

import numpy as np

from tests.kernels.conformance import Found, check

_ERF = np.vectorize(math.erf, otypes=[np.float64])
_ROOT = math.sqrt(2 / math.pi)


def activation_and_slope(name: str, x: Any) -> tuple[Any, Any]:
    """An activation and its derivative."""
    match name:
        case "silu":
            sigmoid = 1 / (1 + np.exp(-x))
            return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
        case "gelu":
            normal = 0.5 * (1 + _ERF(x / math.sqrt(2)))
            return x * normal, normal + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            tanh = np.tanh(_ROOT * (x + 0.044715 * x**3))
            return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * _ROOT * (1 + 0.134145 * x * x)
        case "relu":
            return np.maximum(x, 0), (x > 0).astype(np.float64)
        case "sigmoid":
            sigmoid = 1 / (1 + np.exp(-x))
            return sigmoid, sigmoid * (1 - sigmoid)
        case "tanh":
            return np.tanh(x), 1 - np.tanh(x) ** 2
        case "identity":
            return x, np.ones_like(x)
    raise ValueError(name)


def gate_oracle(activation: str, x: Any, gate: Any, up: Any, d_out: Any) -> dict[str, Any]:
    """``act(x · gate) * (x · up)`` of matrices, and the gradients."""
    x, gate, up, d_out = (np.asarray(each).astype(np.float64) for each in (x, gate, up, d_out))
    value, slope = activation_and_slope(activation, x @ gate)
    of_gate, of_up = d_out * (x @ up) * slope, d_out * value
    return {
        "out": value * (x @ up),
        "d_x": of_gate @ gate.T + of_up @ up.T,
        "d_gate": x.T @ of_gate,
        "d_up": x.T @ of_up,
    }


def of_arguments(gradients: dict[str, Any], rows: str = "lhs") -> dict[str, Any]:
    """A backend's gradients by the arguments of a gated op, whose first one has this name."""
    names = {"lhs": rows, "rhs": "gate", "up": "up"}
    return {f"d_{names[field]}": gradient for field, gradient in gradients.items()}


def near(got: Found, want: Found, where: str = "") -> None:
    """Checks results and gradients; pre-activations and their gradients are rounded, too, so three roundings count."""
    assert got.keys() == want.keys()
    check(got, want, factor=4.0, where=where)
