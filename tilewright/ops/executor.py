"""The executor: runs a kernel call with the selected backend, eagerly or under any transformation."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

import jax

from tilewright.ops.config import agreement
from tilewright.ops.config.chooser import ConfigChooser
from tilewright.ops.config.context import current_overrides, synchronise
from tilewright.ops.config.selection import ConfigSelectorChain, default_chain
from tilewright.ops.kernel.arrays import (
    Operand,
    StaticLeaf,
    Structure,
    abstract,
    is_hashable,
    meaningful_sharding,
    split,
    unwrapped_arguments,
)
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.kernel import DEFAULT_EXECUTOR, Invocation, Kernel, check_kernel, errors_naming
from tilewright.ops.kernel.optional import gradient_form
from tilewright.ops.kernel.prepared import prepare, prepared
from tilewright.ops.lowering import derivatives as derivatives  # the rules by which JAX differentiates calls
from tilewright.ops.lowering import split_calls as split_calls  # and those by which XLA splits them
from tilewright.ops.lowering.call import Selector, apply, apply_backward
from tilewright.ops.lowering.found_calls import FoundCall, backward_calls, found_calls
from tilewright.ops.lowering.programs import Program, Programs
from tilewright.ops.lowering.surroundings import operand_devices
from tilewright.ops.types import Cfg, Out
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.target import check_runs_here

__all__ = ["ConfigChooser", "Executor", "Explanation", "default_executor"]


class Executor(Generic[Cfg, Out]):
    """Runs kernels with configs from a chooser.

    An eager call is compiled once for each argument structure and set of shapes. A call under a trace becomes one
    equation of the caller's program; its config is chosen when that program is lowered.
    """

    def __init__(self, chooser: ConfigChooser):
        if not isinstance(chooser, ConfigChooser):
            raise TypeError(f"an Executor needs a ConfigChooser, got {chooser!r} of type {type(chooser).__name__}")
        self.chooser = chooser
        self._programs = Programs()

    def __call__(self, kernel: Kernel[Cfg, Out], *args: object, cfg: object = None, **kwargs: object) -> Out:
        arrays, structure = split((args, kwargs))
        check_kernel(kernel)
        overrides = current_overrides()
        synchronise()
        selector = Selector(self.chooser, _static(cfg), overrides)
        for array in arrays:
            if isinstance(array, jax.core.Tracer):
                kernel.check_contents(args, kwargs, is_traced=True)
                out: Out = call_kernel(kernel, selector, args, kwargs, {})
                break
        else:
            kernel.check_contents(args, kwargs, is_traced=False)
            check_runs_here()
            with agreement.run_by(lambda: operand_devices(arrays)):
                out = self._program(kernel, selector, structure, arrays).run(arrays)
        return out

    def gradients(
        self,
        kernel: Kernel[Any, Any],
        wanted: Sequence[str],
        residuals: object,
        cotangents: tuple[Any, ...],
        *args: object,
        cfg: object = None,
        **kwargs: object,
    ) -> list[Any]:
        """Returns the gradients of the arguments ``wanted`` by the kernel's backward pass, from given residuals."""
        synchronise()
        selector = Selector(self.chooser, _static(cfg), current_overrides())
        given, named = prepare(kernel, args, kwargs)
        return apply_backward(kernel, selector, (tuple(given), dict(named)), residuals, cotangents, wanted)

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: object, cfg: object = None, **kwargs: object) -> Cfg:
        """Returns the forward config that a call would run with; tunes the call if the policy allows it.

        Of a call that is computed by calls on the devices' parts of its arrays, the config of the first of those.
        """
        (first, *_), _ = self._calls(kernel, cfg, args, kwargs)
        chosen: Cfg = first.chooser.choose(first.inv, cfg=first.cfg).config
        return chosen

    def compile(
        self, kernel: Kernel[Cfg, Out], *example_args: object, cfg: object = None, **kwargs: object
    ) -> Callable[..., Out]:
        """Returns a function of arguments like the examples (arrays or ``ShapeDtypeStruct``), compiled now.

        It behaves like calling the kernel with the same keywords: other shapes are compiled when they first occur, and
        gradients, ``jit`` and ``vmap`` work.
        """
        arrays, structure = split((example_args, kwargs))
        selector = Selector(self.chooser, _static(cfg), current_overrides())
        self._program(kernel, selector, structure, arrays).compile([abstract(a) for a in arrays])

        @functools.wraps(kernel.run)
        def compiled(*args: object, **more: object) -> Out:
            return self(kernel, *args, cfg=cfg, **(kwargs | more))

        return compiled

    def explain(
        self, kernel: Kernel[Cfg, Out], *args: object, cfg: object = None, quiet: bool = False, **kwargs: object
    ) -> "Explanation":
        """Explains which config a call would run with, where it comes from, and why others were rejected; measures
        nothing.

        If devices exchange more than sums, the calls on their parts of the arrays are explained.

        Args:
          quiet: return the explanation without printing it.
        """
        calls, by_parts = self._calls(kernel, cfg, args, kwargs, derivative=True)
        choices = tuple(Executor(each.chooser).explain_choice(each.inv, each.cfg) for each in calls)
        explanation = Explanation(kernel.name, choices, by_parts)
        if not quiet:
            print(explanation)
        return explanation

    def explain_choice(self, inv: Invocation[Any, Any], cfg: object) -> "ExplainedChoice":
        selection = self.chooser.lookup(inv, cfg=cfg)
        time_ms, step = selection.time_ms, selection.step
        measured: Sequence[Candidate] = ()
        if isinstance(self.chooser, ConfigSelectorChain):
            stored = self.chooser.measurements(inv)
            measured = () if stored is None else stored[2]
            if stored is None and (shipped := self.chooser.shipped(inv)) is not None:
                measured = shipped.candidates
            time_ms = self.chooser.measured_ms(inv, selection.config)
            policy = self.chooser.effective_policy()
            if (
                step in ("simulated", "nearest", "heuristic")
                and policy.allow_autotune
                and policy.cache_miss_fallback == "autotune"
            ):
                step += ", until the call is tuned, which the policy allows"
            unbuilt = self.chooser.not_built(inv, selection)
            if unbuilt is not None:
                step += f", until nvcc has compiled {', '.join(map(str, unbuilt[1]))} for {describe_config(unbuilt[0])}"
            leader = self.chooser.leader(inv)
            if step not in ("explicit", agreement.STEP) and leader not in (None, jax.process_index()):
                step += f", unless process {leader} decides otherwise when the program is compiled"
            refused = "" if step in ("explicit", "overlay", "lock") else self.chooser.lock_refusal(inv)
            if refused:
                step += f", but the call is an error: {refused}"
        return ExplainedChoice(
            inv.direction,
            selection.config,
            step,
            time_ms,
            inv.key,
            inv.kernel.rejection_reasons(inv, selection.config, measured),
            selection.detail,
            inv.kernel.name,
            tuple(inv.kernel.advice(inv, selection.config)),
        )

    def _calls(
        self,
        kernel: Kernel[Any, Any],
        cfg: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        derivative: bool = False,
    ) -> tuple[list[FoundCall], bool]:
        """The call itself, or, and then True, those on the devices' parts of its arrays by which it is computed.

        Args:
          derivative: add the backward passes, if the kernel defines one.
        """
        check_kernel(kernel)
        args, kwargs = unwrapped_arguments(args, kwargs)
        arrays, structure = split((args, kwargs))
        by_parts: list[bool] = []

        def whole_call(*traced: Any) -> Any:
            given, named = structure.join(traced)
            with errors_naming(kernel):
                parts = kernel.distributed(cfg, given, named)
                by_parts.append(parts is not None)
                return None if parts is None else parts()

        structs, both = [abstract(array) for array in arrays], derivative and gradient_form(kernel) is not None
        forward = found_calls(whole_call, structs)
        if by_parts[0]:
            return [*forward, *(backward_calls(whole_call, structs) if both else ())], True
        inv, _ = prepared(kernel, args, kwargs, concrete=False)
        return [FoundCall(self.chooser, each, cfg) for each in ([inv, inv.backward()] if both else [inv])], False

    def _program(
        self, kernel: Kernel[Any, Any], selector: Selector, structure: Structure, arrays: Sequence[Operand]
    ) -> Program:
        shardings = tuple(meaningful_sharding(array) for array in arrays)

        def whole_call() -> Callable[..., Any]:
            check_kernel(kernel)

            def eager(arrays: list[Any]) -> Any:
                args, kwargs = structure.join(arrays)
                known = {id(a): s for a, s in zip(arrays, shardings, strict=True) if s is not None}
                return call_kernel(kernel, selector, args, kwargs, known)

            eager.__name__ = eager.__qualname__ = kernel.name
            return eager

        key = (kernel, selector, structure, shardings)
        return self._programs.get(key, self.chooser, selector.overrides, whole_call)


def call_kernel(
    kernel: Kernel[Any, Any],
    selector: Selector,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    known_shardings: Mapping[int, jax.sharding.Sharding],
) -> Any:
    """Prepares a call and binds it as the call primitive."""
    check_kernel(kernel)
    args, kwargs = unwrapped_arguments(tuple(args), dict(kwargs))
    with errors_naming(kernel):
        by_parts = kernel.distributed(selector.explicit, args, kwargs)
        if by_parts is not None:
            return by_parts()
        given, named = kernel.bind(args, kwargs)
    return apply(kernel, selector, given, named, known_shardings)


def _static(cfg: object) -> StaticLeaf | None:
    if cfg is None:
        return None
    if not is_hashable(cfg):
        raise TypeError(f"{cfg=} must be hashable, such as a frozen dataclass, not of type {type(cfg).__name__}")
    return StaticLeaf(cfg)


def default_key_builder_with_sharding(
    kernel: Kernel[Any, Any],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    direction: str = "forward",
) -> str:
    """Returns the key under which the selection chain looks a call up."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"{args=} must be a tuple of the call's positional arguments")
    inv, _ = prepared(kernel, tuple(args), dict(kwargs or {}), concrete=False)
    return dataclasses.replace(inv, direction=direction).key  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedChoice:
    """One direction of an explained call.

    Attributes:
      step: the step of the selection chain that the config comes from.
      time_ms: the config's measured time, if there is one.
      rejected: the reasons why each other backend was not chosen.
      detail: more about the step: which lock, or which shapes the config was measured for and how far away they are.
      op: the name of the kernel that is called, which may be another than the explained one on parts of its arrays.
      advice: changes to the call that would make it faster.
    """

    direction: str
    config: Any
    step: str
    time_ms: float | None
    key: str
    rejected: Mapping[str, Sequence[str]]
    detail: str = ""
    op: str = ""
    advice: Sequence[str] = ()

    @property
    def origin(self) -> str:
        """The step followed by its detail."""
        return f"{self.step}, {self.detail}" if self.detail else self.step

    @property
    def origin_and_time(self) -> str:
        """The origin with the measured time; of the nearest shape's config the origin says what was measured."""
        if self.time_ms is None:
            return self.origin if self.step.startswith("nearest") else f"{self.origin}; not measured"
        return f"{self.origin}; {self.time_ms:.3f} ms"

    def __str__(self) -> str:
        return _text((self,))


def chosen_lines(choices: Sequence[ExplainedChoice]) -> list[str]:
    """For each direction of a call the config, with its origin and its time."""
    width = max(len(choice.direction) for choice in choices) + 1
    return [
        f"{choice.direction + ':':{width}} {describe_config(choice.config)} ({choice.origin_and_time})"
        for choice in choices
    ]


def other_lines(choices: Sequence[ExplainedChoice], unsaid: Collection[str] = ()) -> list[str]:
    """The reasons against the other backends of a call, and advice; what holds for several or both directions once.

    Args:
      unsaid: backends to leave out.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(name for choice in choices for name in choice.rejected if name not in unsaid):
        against = {each.direction: "; ".join(each.rejected[name]) for each in choices if name in each.rejected}
        same = len(against) == len(choices) and len(set(against.values())) == 1
        for direction, why in against.items():
            names = reasons.setdefault((why, "" if same else f" ({direction})"), [])
            names += [name] * (name not in names)
    found = [f"not {', '.join(names)}{direction}: {why}" for (why, direction), names in reasons.items()]
    return found + [f"faster: {each}" for each in dict.fromkeys(x for choice in choices for x in choice.advice)]


def _text(choices: Sequence[ExplainedChoice]) -> str:
    return "\n".join([*chosen_lines(choices), *(f"  {line}" for line in other_lines(choices))])


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The configs that a call would run with: one choice for each direction that the kernel defines.

    Attributes:
      by_parts: True if other calls on the devices' parts of its arrays compute it: then the choices are theirs, first
        all of the forward pass.
    """

    op: str
    choices: tuple[ExplainedChoice, ...]
    by_parts: bool = False

    @property
    def forward(self) -> ExplainedChoice:
        return self.choices[0]

    @property
    def config(self) -> Any:
        return self.forward.config

    @property
    def step(self) -> str:
        return self.forward.step

    @property
    def time_ms(self) -> float | None:
        return self.forward.time_ms

    @property
    def rejected(self) -> Mapping[str, Sequence[str]]:
        return self.forward.rejected

    def __str__(self) -> str:
        if not self.by_parts:
            return f"{self.op}\n{_text(self.choices)}"
        head = f"{self.op}, by calls on the devices' parts of its arrays"
        return "\n".join([head, *(f"{each.op} of {describe_key(each.key)}\n{each}" for each in self.choices)])


@functools.cache
def default_executor() -> Executor[Any, Any]:
    """The executor behind ``kernel(...)`` and the functions of ``tilewright.modules``."""
    return Executor(default_chain())


DEFAULT_EXECUTOR.fill(default_executor)
