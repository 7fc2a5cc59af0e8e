"""Vocabulary losses and their gradients by their definition, in NumPy and float64, with the logits in memory."""

from typing import Any

import numpy as np

type Found = dict[str, Any]


def f64(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def head(x: Any, weight: Any, bias: Any, vocab_first: bool, cap: float | None) -> tuple[Any, Any, Any]:
    """Logits after the soft cap, their derivative by those before it, and the matrix ``[d, vocab]``."""
    matrix = weight.T if vocab_first else weight
    logits = x @ matrix
    logits = logits if bias is None else logits + bias
    if cap is None:
        return logits, np.ones_like(logits), matrix
    capped = cap * np.tanh(logits / cap)
    return capped, 1 - (capped / cap) ** 2, matrix


def log_softmax(logits: Any) -> tuple[Any, Any]:
    high = logits.max(-1, keepdims=True)
    lse = high + np.log(np.exp(logits - high).sum(-1, keepdims=True))
    return logits - lse, lse


def reduced(each: Any, valid: Any, token_weights: Any, reduction: str, d_loss: Any) -> tuple[Any, Any, Any]:
    """The loss of those of tokens, and the gradients of these and of their weights."""
    weights = np.where(valid, 1.0 if token_weights is None else f64(token_weights).reshape(-1), 0)
    if reduction == "none":
        of_each = f64(d_loss).reshape(-1)
        return each * weights, of_each * weights, of_each * each
    count = weights.sum()
    scale = 1.0 if reduction == "sum" else (0.0 if count == 0 else 1 / count)
    loss = (each * weights).sum() * scale
    of_each = np.full(len(valid), float(d_loss) * scale)
    return loss, of_each * weights, of_each * (each - (loss if reduction == "mean" else 0))


def cross_entropy(
    x: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    vocab_first: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int = -100,
    token_weights: Any = None,
    reduction: str = "mean",
    return_lse: bool = False,
    gradient_epsilon: float | None = None,
    d_loss: Any = 1.0,
    d_lse: Any = None,
) -> Found:
    """Loss, lse, and the gradients of x, weight, bias and token_weights for cotangents of both results."""
    shape, d = np.shape(x)[:-1], np.shape(x)[-1]
    labels = np.asarray(labels).reshape(-1)
    valid = labels != ignore_index
    x, weight = np.where(valid[:, None], f64(x).reshape(-1, d), 0), f64(weight)
    logits, slope, matrix = head(x, weight, None if bias is None else f64(bias), vocab_first, logits_soft_cap)
    log_p, lse = log_softmax(logits)
    vocab = logits.shape[1]
    own = np.zeros_like(logits)
    own[valid, labels[valid]] = 1
    each = -(1 - label_smoothing) * (own * log_p).sum(-1) - label_smoothing * log_p.mean(-1) + z_loss * lse[:, 0] ** 2
    each = np.where(valid, each, 0)
    loss, of_each, of_weights = reduced(each, valid, token_weights, reduction, d_loss)
    p = np.exp(log_p)
    if gradient_epsilon is not None:
        p = np.where(p < gradient_epsilon, 0, p)
    of_lse = of_each * (1 + 2 * z_loss * lse[:, 0])
    if d_lse is not None:
        of_lse = of_lse + f64(d_lse).reshape(-1)
    g = (
        of_lse[:, None] * p
        - (of_each * (1 - label_smoothing))[:, None] * own
        - of_each[:, None] * label_smoothing / vocab
    )
    g = np.where(valid[:, None], g, 0) * slope
    d_matrix = x.T @ g
    return {
        "loss": loss.reshape(shape) if reduction == "none" else loss,
        "lse": np.where(valid, lse[:, 0], 0).reshape(shape),
        "x": (g @ matrix.T).reshape(*shape, d),
        "weight": d_matrix.T if vocab_first else d_matrix,
        "bias": g.sum(0),
        "token_weights": np.where(valid, of_weights, 0).reshape(shape),
    }


def kl_divergence(
    student_x: Any,
    student_weight: Any,
    teacher_x: Any,
    teacher_weight: Any,
    *,
    temperature: float = 1.0,
    vocab_first: bool = False,
    logits_soft_cap: float | None = None,
    mask: Any = None,
    token_weights: Any = None,
    reduction: str = "mean",
    d_loss: Any = 1.0,
) -> Found:
    """The divergence, and the gradients of all arrays."""
    shape = np.shape(student_x)[:-1]
    valid = np.ones(shape, bool) if mask is None else np.asarray(mask)
    valid = valid.reshape(-1)
    flat = lambda x: np.where(valid[:, None], f64(x).reshape(-1, np.shape(x)[-1]), 0)
    xs = flat(student_x), flat(teacher_x)
    u, of_u, m_u = head(xs[0], f64(student_weight), None, vocab_first, logits_soft_cap)
    v, of_v, m_v = head(xs[1], f64(teacher_weight), None, vocab_first, logits_soft_cap)
    (log_p, _), (log_q, _) = log_softmax(u / temperature), log_softmax(v / temperature)
    p, q = np.exp(log_p), np.exp(log_q)
    each = np.where(valid, (q * (log_q - log_p)).sum(-1), 0)
    loss, of_each, of_weights = reduced(each, valid, token_weights, reduction, d_loss)
    c = of_each[:, None] / temperature
    g_u, g_v = c * (p - q) * of_u, c * q * (log_q - log_p - each[:, None]) * of_v
    turned = lambda matrix: matrix.T if vocab_first else matrix
    return {
        "loss": loss.reshape(shape) if reduction == "none" else loss,
        "student_x": (g_u @ m_u.T).reshape(np.shape(student_x)),
        "student_weight": turned(xs[0].T @ g_u),
        "teacher_x": (g_v @ m_v.T).reshape(np.shape(teacher_x)),
        "teacher_weight": turned(xs[1].T @ g_v),
        "token_weights": np.where(valid, of_weights, 0).reshape(shape),
    }
