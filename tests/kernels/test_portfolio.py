"""A small op with four backends, of which one refuses, one is slow and one cannot be loaded."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.compat.base import KernelConfig
from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS
from tilewright.kernels import kernel as kernel_of
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection, Platform
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.ops import ConfigSelectorChain, Executor, Invocation, from_json, stable_json, to_json
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

HERE = __name__


class Doubling(OpInputs):
    """A call."""

    x: Any
    y: Any = None


class Plain(Backend):
    name = "xla"
    platform = Platform.XLA

    serves = frozenset({"y"})

    def reasons(self, inputs: Any, device: Any, direction: Any) -> list[str]:
        return []

    def heuristic(self, inputs: Any, device: Any, direction: Any) -> Any:
        return FwdParams(q_blocksize=8) if direction == "forward" else BwdParams(q_blocksize=4)

    def candidates(self, inputs: Any, device: Any, direction: Any) -> list[Any]:
        kind = FwdParams if direction == "forward" else BwdParams
        return [kind(q_blocksize=size) for size in (8, 16)]

    def forward(self, inputs: Any, params: FwdParams) -> Any:
        return 2 * inputs.x, jnp.full((), params.q_blocksize, jnp.int32)

    def backward(self, inputs: Any, results: Any, cotangents: Any, params: BwdParams) -> dict[str, Any]:
        return {"x": 2 * cotangents, "y": None}


class Picky(Plain):
    name = "triton"
    platform = Platform.TRITON

    def reasons(self, inputs: Any, device: Any, direction: Any) -> list[str]:
        why = ["backward is not written"] if direction == "backward" else []
        return [*why, *(["length is odd", "length is above 4"] if inputs.x.shape[0] > 4 else [])]


class Picked(Picky):
    name = "picked"
    platform = Platform.XLA


class Wrong(Plain):
    name = "wrong"
    platform = Platform.CUDA

    def forward(self, inputs: Any, params: FwdParams) -> Any:
        return 2.5 * inputs.x, jnp.zeros((), jnp.int32)


class Double(PortfolioKernel):
    def __init__(self, *names: str) -> None:
        where = [name if ":" in name else f"{HERE}:{name}" for name in names] or [
            "absent.module:Absent",
            f"{HERE}:Picky",
            f"{HERE}:Plain",
        ]
        super().__init__("double", version="1", backends=where)

    def prepare(self, x: Any, y: Any = None, *, platform: Any = None) -> Doubling:
        return Doubling(x, y, platform=None if platform is None else tuple(map(Platform, platform)))

    def results(self, inputs: Doubling) -> Any:
        return jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype), jax.ShapeDtypeStruct((), jnp.int32)

    def outputs(self, inputs: Doubling, results: Any) -> Any:
        return results[0]

    def cotangents(self, inputs: Doubling, residuals: Any, cotangents: Any) -> Any:
        return cotangents[0]

    def reference(self, inputs: Doubling) -> Any:
        return 2 * inputs.x


@pytest.fixture
def executor() -> Executor[Any, Any]:
    return Executor(ConfigSelectorChain())


def test_the_first_backend_that_can_serves_the_call(executor: Any) -> None:
    kernel = Double()
    assert executor.choose_config(kernel, jnp.ones(4)).backend == "triton"
    assert executor.choose_config(kernel, jnp.ones(5)).backend == "xla"
    np.testing.assert_array_equal(executor(kernel, jnp.ones(5)), np.full(5, 2.0))


def test_each_direction_takes_its_own_backend(executor: Any) -> None:
    explanation = executor.explain(Double(), jnp.ones(4), quiet=True)
    assert [choice.config.backend for choice in explanation.choices] == ["triton", "xla"]
    np.testing.assert_array_equal(jax.grad(lambda x: executor(Double(), x).sum())(jnp.ones(4)), np.full(4, 2.0))


def test_a_named_platform_is_strict_and_its_error_lists_every_reason(executor: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        executor(Double(), jnp.ones(5), platform=["triton", "cuda"])
    assert set(caught.value.reasons["triton"]) == {"length is odd", "length is above 4"}
    assert "no backend" in caught.value.reasons["cuda"][0]
    assert "xla" not in caught.value.reasons


def test_an_unloadable_backend_is_a_reason_not_an_error(executor: Any) -> None:
    explanation = executor.explain(Double(), jnp.ones(5), quiet=True)
    assert "No module named 'absent'" in explanation.rejected["module"][0]
    with pytest.raises(UnsupportedError, match="No module named 'absent'"):
        executor(Double("absent.module:Absent"), jnp.ones(5))


def test_platforms_are_tried_in_the_callers_order(executor: Any) -> None:
    assert executor.choose_config(Double(), jnp.ones(4), platform=["xla", "triton"]).backend == "xla"
    assert executor.choose_config(Double(), jnp.ones(4), platform=["cuda", "triton"]).backend == "triton"


def test_the_config_space_is_that_of_every_able_backend() -> None:
    inv = Invocation(Double(), (Doubling(jnp.ones(4)),))
    space = list(Double().config_space(inv))
    assert {choice.backend for choice in space} == {"triton", "xla"}
    assert {choice.params.q_blocksize for choice in space} == {8, 16}
    assert [choice.backend for choice in space[:2]] == ["triton", "xla"]
    assert [choice.backend for choice in space[2:]] == sorted(choice.backend for choice in space[2:])


def test_a_wrong_backend_never_wins() -> None:
    from tilewright.ops import Autotuner, Tuner

    kernel, chain = Double("Wrong", "Plain"), ConfigSelectorChain()
    inv = Invocation(kernel, (Doubling(jnp.ones(4)),))
    (call,) = Autotuner(Tuner(0, 1), chooser=chain).tune(inv)
    assert call.winner.config.backend == "xla"
    assert {c.check for c in call.candidates if c.config.backend == "wrong"} == {"failed"}


def test_explain_says_how_the_others_did(tmp_path: Path) -> None:
    from tilewright.ops import Autotuner, PersistentCache, Tuner

    kernel, chain = Double("Wrong", "Plain"), ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    inv = Invocation(kernel, (Doubling(jnp.ones(4)),))
    before = Executor(chain).explain_choice(inv, Choice("xla", FwdParams(q_blocksize=8))).rejected
    assert before["wrong"] == ("supported, but not preferred: nothing measured it as faster",)
    (call,) = Autotuner(Tuner(0, 1), chooser=chain).tune(inv)
    after = Executor(chain).explain_choice(inv, None).rejected
    assert "every candidate failed: [0]: largest error" in after["wrong"][0]
    other = next(c.config for c in call.candidates if c.eligible and c.config != call.winner.config)
    said = kernel.rejection_reasons(inv, Choice("hopper", None), call.candidates)["xla"][0]
    assert f"measured at {min(c.time_ms for c in call.candidates if c.eligible):.4g} ms at best" in said
    assert other.backend == "xla"


def test_explain_says_why_a_backend_that_can_was_not_taken() -> None:
    kernel = Double("Picky", "Plain", "Wrong")

    def reasons(platform: Any, chosen: str) -> Any:
        inv = Invocation(kernel, (Doubling(jnp.ones(4), platform=platform),))
        return kernel.rejection_reasons(inv, Choice(chosen, FwdParams(q_blocksize=8)), ())

    behind = ("supported, but behind xla in the order of preference: nothing measured it as faster",)
    assert reasons(None, "xla")["wrong"] == behind
    assert reasons(None, "xla")["triton"] == ("supported, but not preferred: nothing measured it as faster",)
    only = reasons((Platform.XLA,), "xla")
    assert only["triton"] == only["wrong"] == ("supported, but excluded by platform=xla of the call",)
    swapped = reasons((Platform.XLA, Platform.TRITON), "xla")  # the caller's order
    assert swapped["triton"] == behind


@pytest.mark.parametrize(
    ("cfg", "direction", "blocks"),
    [
        (Choice("xla", FwdParams(q_blocksize=32)), "forward", 32),
        (Choice("xla", FwdParams(q_blocksize=32)), "backward", None),
        (FwdParams(q_blocksize=32), "forward", 32),
        (BwdParams(q_blocksize=32), "forward", None),
        (PerDirection(backward=BwdParams(q_blocksize=32)), "backward", 32),
        (PerDirection(backward=BwdParams(q_blocksize=32)), "forward", None),
        (KernelConfig(block_q=32, platform="xla"), "forward", 32),
        (KernelConfig(block_q=32), "backward", 32),
    ],
)
def test_explicit_configs(cfg: Any, direction: Any, blocks: int | None) -> None:
    kernel = Double()
    directed = kernel.resolve_config(cfg, Invocation(kernel, (Doubling(jnp.ones(5)),), direction=direction))
    assert (directed and directed.params.q_blocksize) == blocks


class Further(Plain):
    name = "further"


@pytest.mark.parametrize(
    ("names", "given", "length", "backend"),
    [
        (("Picky", "Wrong", "Plain"), "cuda", 4, "wrong"),
        (("Further", "Plain"), "xla", 4, "xla"),  # a name comes before a platform
        (("Picked", "Further"), "xla", 4, "picked"),
        (("Picked", "Further"), "xla", 5, "further"),
    ],
)
def test_a_choice_of_a_platform_is_its_first_backend_that_can(
    names: tuple[str, ...], given: str, length: int, backend: str
) -> None:
    kernel = Double(*names)
    inv = Invocation(kernel, (Doubling(jnp.ones(length)),))
    assert kernel.resolve_config(Choice(given, FwdParams()), inv) == Choice(backend, FwdParams())


def test_a_choice_of_a_platform_that_cannot_says_why(executor: Any) -> None:
    with pytest.raises(UnsupportedError, match="picked: length is odd"):
        executor(Double("Picked", "Wrong"), jnp.ones(5), cfg=Choice("xla", FwdParams()))
    for name in ("pallas", "metal"):
        with pytest.raises(ValueError, match=f"double has no backend '{name}' that can be loaded here"):
            executor(Double(), jnp.ones(4), cfg=Choice(name, FwdParams()))


@pytest.mark.parametrize("op", OPS)
def test_names_are_unique(op: str) -> None:
    names = [each.name for each in kernel_of(op).backends]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("cfg", [3, "xla", {"q_blocksize": 8}, Choice("xla", 7)])
def test_a_config_of_the_wrong_type_is_a_type_error(executor: Any, cfg: Any) -> None:
    with pytest.raises(TypeError, match=r"cfg=|choice\.params="):
        executor(Double(), jnp.ones(5), cfg=StableHash(cfg) if isinstance(cfg, dict) else cfg)


class StableHash(dict):  # type: ignore[type-arg]
    def __hash__(self) -> int:  # type: ignore[override]
        return 0


def test_an_explicit_choice_that_cannot_serve_says_why(executor: Any) -> None:
    with pytest.raises(UnsupportedError, match="length is odd; length is above 4"):
        executor(Double(), jnp.ones(5), cfg=Choice("triton", FwdParams()))


def test_choices_round_trip_through_json() -> None:
    assert type(Choice(Platform.XLA).backend) is str
    choice = Choice("cutlass", BwdParams(q_blocksize=64))
    assert from_json(to_json(choice), Choice) == choice
    assert stable_json(choice) == stable_json(dataclasses.replace(choice))
    assert str(choice) == "cutlass(q_blocksize=64)"


@pytest.mark.parametrize("where", ["module", "module:", ":Class", Plain])
def test_a_backend_is_given_by_module_and_class(where: Any) -> None:
    with pytest.raises(ValueError, match='the backends of double must be strings "module:Class"'):
        PortfolioKernel.__init__(Double(), "double", version="1", backends=[f"{HERE}:Plain", where])


@pytest.mark.parametrize("op", OPS)
def test_another_process_gets_a_kernel_with_the_same_backends(op: str):
    """As tuning sends it."""
    sent, own = pickle.loads(pickle.dumps(kernel_of(op))).backends, kernel_of(op).backends
    assert (sent.where, sent.preferred) == (own.where, own.preferred)
