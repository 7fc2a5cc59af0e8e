"""The divergence of a student from a teacher: its argument list, and the parts that all its backends share."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.arguments import (
    Reduction,
    may_be_distributed,
    positive,
    reduction_name,
    rows_and_matrix,
    token_weights_array,
)
from tilewright.kernels.linear_cross_entropy.cases import KL_CASES
from tilewright.kernels.linear_cross_entropy.inputs import LossOptions
from tilewright.kernels.linear_cross_entropy.kl_inputs import KlInputs, KlOptions, KlProblem, KlResults, divergences
from tilewright.kernels.linear_cross_entropy.losses import reduced
from tilewright.kernels.linear_cross_entropy.partitioning import token_axes
from tilewright.kernels.linear_cross_entropy.reference import logits_of
from tilewright.kernels.linear_cross_entropy.shards import (
    TypedSplit,
    merged_lse,
    of_all_devices,
    summed_over,
)
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.portfolio import Choice, PortfolioKernel, lazy
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    devices_along,
    explicit_mesh,
    gathered,
    typed_axes,
    typed_spec,
)
from tilewright.ops.kernel.kernel import Invocation, errors_naming
from tilewright.ops.kernel.prepared import prepare
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_cross_entropy.LinearKlDivergence")
class LinearKlDivergence(PortfolioKernel[KlInputs, KlProblem, KlResults]):
    """The divergence between the softmax of two linear heads; see ``linear_kl_divergence`` for the arguments.

    With ``axis_name`` a call of the kernel returns the statistics of a device's part of the vocabulary.
    """

    cases = KL_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"student_x": 1, "teacher_x": 1})

    def __init__(self) -> None:
        backends = ("tilewright.kernels.linear_cross_entropy.xla.kl:XlaLinearKlDivergence",)
        super().__init__("linear_kl_divergence", version="1", implementations=[lazy(each) for each in backends])

    def prepare(
        self,
        student_x: ArrayLike,
        student_weight: ArrayLike,
        teacher_x: ArrayLike,
        teacher_weight: ArrayLike,
        *,
        temperature: float = 1.0,
        vocab_first: bool = False,
        logits_soft_cap: float | None = None,
        mask: ArrayLike | None = None,
        token_weights: ArrayLike | None = None,
        reduction: Reduction = "mean",
        axis_name: str | tuple[str, ...] | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks a call; reads only types, shapes and dtypes."""
        first = arguments.flag("vocab_first", vocab_first)
        student = rows_and_matrix(("student_x", "student_weight"), student_x, student_weight, first)
        teacher = rows_and_matrix(("teacher_x", "teacher_weight"), teacher_x, teacher_weight, first)
        tokens = tuple(student[0].shape[:-1])
        if teacher[0].shape[:-1] != tokens or teacher[2] != student[2]:
            raise ValueError(
                f"student and teacher must have the same tokens and vocabulary, got student_x.shape="
                f"{tuple(student[0].shape)}, teacher_x.shape={tuple(teacher[0].shape)}, and vocabularies "
                f"of {student[2]} and {teacher[2]}"
            )
        args = (*student[:2], *teacher[:2])
        options: dict[str, Any] = {
            "temperature": positive("temperature", temperature),
            "vocab_first": first,
            "logits_soft_cap": arguments.soft_cap(logits_soft_cap),
            "reduction": reduction_name(reduction),
            "platform": arguments.platforms(platform),
        }
        arrays = [*args]
        if mask is not None:
            options["mask"] = _mask_array(mask, tokens)
            arrays.append(options["mask"])
        if token_weights is not None:
            options["token_weights"] = token_weights_array(token_weights, tokens)
            arrays.append(options["token_weights"])
        if axis_name is not None:
            options["is_part"] = True
        if may_be_distributed(*arrays):
            options["is_distributed"] = True
        return args, options

    def inputs(
        self,
        student_x: jax.Array,
        student_weight: jax.Array,
        teacher_x: jax.Array,
        teacher_weight: jax.Array,
        *,
        temperature: float,
        vocab_first: bool,
        logits_soft_cap: float | None,
        reduction: str,
        mask: jax.Array | None = None,
        token_weights: jax.Array | None = None,
        is_part: bool = False,
        is_distributed: bool = False,
        **_: Any,
    ) -> KlInputs:
        """The prepared arguments in the form that backends take."""
        summary: Any = "statistics" if is_part else "none" if reduction == "none" else "scalar"
        options = KlOptions(summary, temperature, vocab_first, logits_soft_cap, is_distributed)
        return KlInputs(student_x, student_weight, teacher_x, teacher_weight, mask, token_weights, options)

    def problem(self, *args: Any, **kwargs: Any) -> KlProblem:
        """The sizes of prepared arguments, abstract or concrete."""
        return KlProblem.of(self.inputs(*args, **kwargs))

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The oracle on prepared arguments: promote narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        cap = LossOptions(vocab_first=inputs.options.vocab_first, logits_soft_cap=inputs.options.logits_soft_cap)
        u, v = (
            logits_of(jnp.where(inputs.valid[..., None], x, 0), weight, None, cap, inputs.wide)
            / inputs.options.temperature
            for x, weight in ((inputs.student_x, inputs.student_weight), (inputs.teacher_x, inputs.teacher_weight))
        )
        if inputs.options.summary == "statistics":
            difference = (jax.nn.softmax(v, -1) * (v - u)).sum(-1)
            found = jax.nn.logsumexp(u, -1), jax.nn.logsumexp(v, -1), difference
            return tuple(jnp.where(inputs.valid, each, 0) for each in found)
        # By its definition, so that the formula from statistics is not checked against itself.
        log_p, log_q = jax.nn.log_softmax(u, -1), jax.nn.log_softmax(v, -1)
        weights = inputs.weights()
        loss = jnp.where(inputs.valid, (jnp.exp(log_q) * (log_q - log_p)).sum(-1), 0) * weights
        reduction = kwargs["reduction"]
        return reduced(loss if reduction == "none" else loss.sum(), weights.sum(), reduction)

    def results(self, inputs: KlInputs) -> Any:
        token, scalar = (jax.ShapeDtypeStruct(shape, inputs.wide) for shape in (inputs.tokens, ()))
        found, summary = KlResults(token, token, token), inputs.options.summary
        if summary == "statistics":
            return found
        sums = {"total": token} if summary == "none" else {"total": scalar, "count": scalar}
        return dataclasses.replace(found, **sums)

    def outputs(self, inputs: KlInputs, results: KlResults, *args: Any, **kwargs: Any) -> Any:
        """The loss, or the statistics."""
        if results.total is None:
            return results.student_lse, results.teacher_lse, results.difference
        return reduced(results.total, results.count, kwargs["reduction"])

    def cotangents(
        self, inputs: KlInputs, results: KlResults, cotangents: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> KlResults:
        """Selects those of the sum of the losses and of the sum of the weights."""
        if results.total is None:
            return KlResults(*cotangents)
        reduction = kwargs["reduction"]
        if reduction == "none":
            return KlResults(None, None, None, total=cotangents[0])
        _, pull_back = jax.vjp(lambda total, count: reduced(total, count, reduction), results.total, results.count)
        of_total, of_count = pull_back(cotangents[0])
        return KlResults(None, None, None, total=of_total, count=of_count)

    def differentiated(self, inputs: KlInputs, wanted: frozenset[str]) -> KlInputs:
        """The inputs, with the names of the arrays whose gradients are used: of a teacher, usually none."""
        return dataclasses.replace(inputs, gradients=wanted & inputs.gradients)

    def partitioning(self, inputs: KlInputs) -> Partitioning | None:
        """Splits by tokens, as in the types of both x."""
        return kl_partitioning(inputs)

    def sample_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal arrays, and logits of about 1."""
        args, kwargs = super().sample_inputs(inv, key)
        problem = self.problem_of(inv)
        scales = (1.0, max(problem.d, 1) ** -0.5, 1.0, max(problem.teacher_d, 1) ** -0.5)
        return tuple((x * scale).astype(x.dtype) for x, scale in zip(args, scales, strict=True)), kwargs

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of two matmuls forward, and of four backward with a constant teacher; bytes of every array once."""
        problem, operands = self.problem_of(inv), array_bytes(inv.abstract_args)
        student, teacher = (2.0 * problem.tokens * problem.vocab * d for d in (problem.d, problem.teacher_d))
        if inv.direction == "forward":
            return Cost(student + teacher, float(operands))
        return Cost(3 * student + teacher, 2.0 * operands)

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Nothing: the mask may be False for all tokens."""
        return Cost(0.0, 0.0)


def _mask_array(mask: object, tokens: tuple[int, ...]) -> jax.Array:
    array = arguments.as_array("mask", mask)
    if array.dtype != jnp.bool_ or array.shape != tokens:
        raise ValueError(
            f"mask must be booleans [...] as the tokens of x, {tokens}, got {array.shape=}, {array.dtype=}"
        )
    return array


def kl_partitioning(inputs: KlInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    names = ("student_x", "teacher_x", "mask", "token_weights")
    by_token = {name: array for name in names if (array := getattr(inputs, name)) is not None}
    matrices = {"student_weight": inputs.student_weight, "teacher_weight": inputs.teacher_weight}
    mesh = explicit_mesh(*by_token.values(), *matrices.values())
    if mesh is None:
        return None
    split, axes = token_axes(by_token, len(inputs.tokens))
    tokens, whole = PartitionSpec(*split), PartitionSpec()
    specs = dict.fromkeys(by_token, tokens) | dict.fromkeys(matrices, whole)
    summary, structure = inputs.options.summary, inputs
    of_total = None if summary == "statistics" else whole if summary == "scalar" else tokens

    def on_results(results: KlResults) -> KlResults:
        if summary != "scalar" or not axes:
            return results
        total, count = lax.psum((results.total, results.count), axes)
        return dataclasses.replace(results, total=total, count=count)

    return Partitioning(
        mesh=mesh,
        inputs=dataclasses.replace(structure, **specs),  # type: ignore[arg-type]
        results=KlResults(tokens, tokens, tokens, of_total, whole if summary == "scalar" else None),
        gradients={
            name: GradientParts(specs[name], () if name in by_token else axes, typed_spec(array))
            for name, array in (by_token | matrices).items()
            if name != "mask"
        },
        on_results=on_results,
        shared_with_xla=False,
    )


_LINEAR_KL_DIVERGENCE = LinearKlDivergence()


@public_function(LinearKlDivergence.prepare)
def linear_kl_divergence(*args: Any, **kwargs: Any) -> jax.Array:
    """The Kullback-Leibler divergence KL(teacher ‖ student) of two linear heads, without their logits in memory.

    ``Σ q (log q - log p)`` with ``p = softmax(student_x · student_weight / temperature)`` and q the teacher's, in
    float32. It is not multiplied by the square of the temperature. Gradients flow to the teacher, too, if they
    are used: ``jax.lax.stop_gradient`` or not differentiating it saves their time.

    Args:
      student_x: ``[..., d]``, floating-point.
      student_weight: ``[d, vocab]``.
      teacher_x: ``[..., e]``.
      teacher_weight: ``[e, vocab]``.
      temperature: divides the logits of both.
      vocab_first: both matrices are ``[vocab, d]``.
      logits_soft_cap: logits become ``cap · tanh(logits / cap)``, before the temperature.
      mask: ``[...]`` booleans, False for tokens that count nowhere; whatever they hold reaches nothing.
      token_weights: ``[...]``, multiplied with the divergences.
      reduction: "mean" divides the sum by that of the weights of tokens that count (without weights by their number;
        over no token it is 0), "sum", or "none" for each token.
      axis_name: inside ``shard_map``, the mesh axis over which the vocabulary is split: both matrices are this
        device's part. On explicit axes the types of the matrices say so instead.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The divergence, a scalar or ``[...]``, in float32 (float64 for float64).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    if (axis_name := kwargs.get("axis_name")) is not None:
        return _split_vocabulary(args, kwargs, axis_name)
    given = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
    with errors_naming(_LINEAR_KL_DIVERGENCE):
        split = _typed_split(given)
        if split is not None:
            return _on_explicit_axes(split, given)
    return _LINEAR_KL_DIVERGENCE(*args, **kwargs)


_POSITIONAL = ("student_x", "student_weight", "teacher_x", "teacher_weight")


def _typed_split(given: Mapping[str, Any]) -> TypedSplit | None:
    """The split of the vocabulary that types of a call's arrays ask for, if they may be those of a right call."""
    student, student_weight, teacher, teacher_weight = (given.get(name) for name in _POSITIONAL)
    axis = 0 if given.get("vocab_first") else 1
    matrices = {"student_weight": student_weight, "teacher_weight": teacher_weight}
    known = {name: (x, axis) for name, x in matrices.items() if isinstance(x, jax.Array) and x.ndim == 2}
    if len(known) < 2 or all(typed_axes(x)[axis] is None for x, _ in known.values()):
        return None
    if student is None or teacher is None:
        return None
    arrays = {name: given.get(name) for name in ("student_x", "teacher_x", "mask", "token_weights")}
    by_token = {name: arguments.as_array(name, each) for name, each in arrays.items() if each is not None}
    return TypedSplit.of(by_token, known, by_token["student_x"].ndim - 1)


def _on_explicit_axes(split: TypedSplit, given: Mapping[str, Any]) -> jax.Array:
    """The divergence over a vocabulary that is split by the types of the matrices."""
    of_matrix = split.spec(2, 0 if given.get("vocab_first") else 1)
    specs = {"student_x": split.tokens, "student_weight": of_matrix, "teacher_x": split.tokens}
    specs |= {"teacher_weight": of_matrix, "mask": split.tokens, "token_weights": split.tokens}
    arrays = {name: arguments.as_array(name, given[name]) for name in specs if given.get(name) is not None}
    options = {name: value for name, value in given.items() if name not in specs} | {"axis_name": split.vocab}
    divergence: jax.Array = split.run(
        lambda parts: _split_vocabulary((), parts | options, split.vocab, split.token_names),
        arrays,
        {name: specs[name] for name in arrays},
        split.tokens if given.get("reduction") == "none" else PartitionSpec(),
    )
    return divergence


def _split_vocabulary(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    axis_name: str | tuple[str, ...],
    token_names: tuple[str, ...] = (),
) -> jax.Array:
    """The divergence over a vocabulary that is split over a mesh axis, from each device's statistics.

    Args:
      token_names: axes over which tokens are split, if a scalar is to be that of all of them.
    """
    given, checked = prepare(_LINEAR_KL_DIVERGENCE, args, dict(kwargs))
    with errors_naming(_LINEAR_KL_DIVERGENCE):
        devices_along(axis_name, "vocabulary")
    inputs, reduction = _LINEAR_KL_DIVERGENCE.inputs(*given, **checked), checked["reduction"]
    rest = {name: value for name, value in kwargs.items() if name not in _POSITIONAL}
    student, teacher = (of_all_devices(x, axis_name) for x in (inputs.student_x, inputs.teacher_x))
    statistics = _LINEAR_KL_DIVERGENCE(student, inputs.student_weight, teacher, inputs.teacher_weight, **rest)
    parts = gathered(jnp.stack(statistics), axis_name)
    # As of a vocabulary that is whole, from here on in plain JAX.
    lse = [merged_lse(parts[:, i]) for i in (0, 1)]
    # Each device's difference is a mean in its part of the teacher's probabilities.
    difference = (jnp.exp(parts[:, 1] - lse[1]) * parts[:, 2]).sum(0)
    weights = inputs.weights()
    loss = jnp.where(inputs.valid, divergences(KlResults(lse[0], lse[1], difference)), 0) * weights
    if reduction == "none":
        return loss
    total, count = summed_over((loss.sum(), weights.sum()), token_names)
    return reduced(total, count, reduction)
