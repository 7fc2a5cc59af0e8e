"""``tune``: every kernel call of a function, found in its lowered program, measured, and used from then on."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.kernel.samples import FORMS, QUICK, A, B, Config, Pair, Product, Recomputing, watching
from tilewright import NoConfigError
from tilewright.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    default_executor,
    find_invocations,
    label,
    overlay_cache,
    tune,
)
from tilewright.ops.config.results import Confirmation
from tilewright.ops.kernel.candidates import Timing
from tilewright.ops.types import MappedAxis


@pytest.fixture
def chain():
    return ConfigSelectorChain()


@pytest.fixture
def executor(chain):
    return Executor(chain)


def found(function, *args, **kwargs):
    return {(inv.direction, inv.args[0].shape, inv.mapped) for inv in find_invocations(function, *args, **kwargs)}


class TestWhatIsFound:
    def test_in_functions_of_any_kind(self, executor):
        kernel = Pair("tests.program")
        forward = lambda a: executor(kernel, a, B).sum()
        both = {("forward", (6, 5), ()), ("backward", (6, 5), ())}
        assert found(forward, A) == {("forward", (6, 5), ())}
        assert found(jax.jit(forward), A) == {("forward", (6, 5), ())}
        assert found(jax.grad(forward), A) == both
        assert found(jax.jit(jax.value_and_grad(forward)), A) == both
        assert found(lambda a: jax.lax.scan(lambda c, _: (c + forward(a), None), 0.0, None, length=3)[0], A) == {
            ("forward", (6, 5), ())
        }
        mapped = (MappedAxis(3, (True, False)),)
        assert found(jax.vmap(jax.grad(forward)), jnp.stack([A] * 3)) == {
            ("forward", (6, 5), mapped),
            ("backward", (6, 5), mapped),
        }
        assert found(jax.checkpoint(forward), A) == {("forward", (6, 5), ())}
        assert found(lambda a: a, A) == set()

    def test_per_device_in_a_shard_map(self, executor):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
        kernel = Pair("tests.program")
        spread = jax.shard_map(lambda a: executor(kernel, a, B), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        assert found(jax.grad(lambda a: spread(a).sum()), A) == {("forward", (3, 5), ()), ("backward", (3, 5), ())}

    @pytest.mark.parametrize("form", FORMS)
    def test_the_keys_are_those_of_the_call(self, form):
        keys = []
        executor = Executor(ConfigSelectorChain(on_event=lambda selection: keys.append(selection.key)))
        function = jax.vmap(jax.grad(lambda a: executor(form("tests.program"), a, B, scale=2.0).sum()))
        invocations = find_invocations(function, jnp.stack([A] * 3))
        keys.clear()
        jax.jit(function)(jnp.stack([A] * 3))
        assert {inv.key for inv in invocations} == set(keys)

    def test_once_for_equal_calls(self, executor):
        kernel = Product("tests.program")
        function = lambda a: executor(kernel, a, B) + executor(kernel, 2 * a, B) + executor(kernel, a, B, scale=2.0)
        assert [inv.kwargs for inv in find_invocations(function, A)] == [{}, {"scale": 2.0}]

    def test_not_calls_with_an_explicit_config(self, executor):
        kernel = Product("tests.program")
        function = lambda a: executor(kernel, a, B, cfg=Config(3)) + executor(kernel, a[:3], B).sum()
        assert found(function, A) == {("forward", (3, 5), ())}

    def test_with_structs_keywords_and_static_arguments(self, executor):
        kernel = Product("tests.program")
        struct = jax.ShapeDtypeStruct((6, 5), jnp.float32)
        assert found(lambda a, *, b: executor(kernel, a, b), struct, b=B) == {("forward", (6, 5), ())}
        static = jax.jit(lambda a, n: executor(kernel, a[:n], B), static_argnums=1)
        assert found(static, A, 2) == {("forward", (2, 5), ())}

    def test_beside_labels_of_the_user(self, executor):
        kernel = Product("tests.program")
        named = label("tilewright.v1.mine")(lambda a: executor(kernel, jnp.sin(a), B))
        assert found(lambda a: named(a) + 1, A) == {("forward", (6, 5), ())}

    def test_even_where_a_miss_is_an_error(self):
        strict = Executor(ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="error")))
        function = lambda a: strict(Product("tests.program"), a, B)
        assert len(find_invocations(function, A)) == 1
        with pytest.raises(NoConfigError):
            jax.jit(function)(A)

    def test_and_nothing_is_tuned_or_kept(self):
        events = []
        executor = Executor(ConfigSelectorChain(autotune=True, tuner=QUICK, on_event=lambda e: events.append(e)))
        kernel = Product("tests.program")
        function = jax.jit(lambda a: executor(kernel, a, B))
        find_invocations(function, A)
        assert {getattr(e, "step", None) for e in events} == {"heuristic"}
        function(A)
        assert events[-1].step == "autotune"


class TestTune:
    @pytest.mark.parametrize("form", FORMS)
    def test_measures_both_directions_and_stores_the_winners(self, form, executor, chain, tmp_path):
        chain.persistent = PersistentCache(tmp_path)
        kernel = form("tests.program.tune")
        step = jax.jit(jax.grad(lambda a: jnp.sin(executor(kernel, a, B)).sum()))
        result = tune(step, A, chooser=chain, tuner=QUICK)
        assert isinstance(result, AutotuningResult)
        directions = ["forward"] if form is Product else ["backward", "forward"]
        assert sorted(e.direction for e in result) == directions
        assert all(c.check == "passed" for e in result for c in e.candidates)
        assert {key: chain.cache.get(key) for key in result.configs} == result.configs
        assert {key: PersistentCache(tmp_path).get(key) for key in result.configs} == result.configs
        np.testing.assert_allclose(step(A), jnp.cos(A @ B) @ B.T, rtol=1e-5, atol=1e-5)

    def test_takes_the_default_executor(self):
        kernel = Recomputing("tests.program.default")
        result = tilewright.tune(lambda a: kernel(a, B), A, tuner=QUICK)
        assert default_executor().choose_config(kernel, A, B) == result.entries[0].winner.config
        assert tilewright.tune(lambda a: kernel(a, B), A, tuner=QUICK).entries[0].step == "disk"
        assert tilewright.tune(lambda a: kernel(a, B), A, tuner=QUICK, reuse=False).entries[0].step == "measured"

    def test_a_jitted_function_then_runs_with_the_winners(self, executor, chain):
        kernel = Pair("tests.program.winners")
        step = jax.jit(jax.grad(lambda a: executor(kernel, a, B).sum()))
        for before in (False, True):
            chain.cache.clear()
            if before:
                step(A)
            tune(step, A, chooser=chain, tuner=QUICK)
            # Whatever won: another than the heuristic must be what runs next.
            for inv, cfg in (
                (Invocation(kernel, (A, B)), Config(16)),
                (Invocation(kernel, (A, B)).backward(), Config(16)),
            ):
                chain.cache.put(inv.key, cfg)
            with overlay_cache(ConfigCache()), watching() as seen:
                step(A)
            assert {(s.stage, s.cfg) for s in seen} >= {("forward", Config(16)), ("backward", Config(16))}

    def test_budget_verify_and_events(self, executor, chain):
        events = []
        kernel = Product("tests.program.options")
        function = lambda a: executor(kernel, a, B)
        result = tune(function, A, chooser=chain, tuner=QUICK, call_budget_s=1e-9, verify=False, on_event=events.append)
        assert result.entries[0].candidates[0].check == "unchecked"
        assert type(events[-1]).__name__ == "CallTuned"

    def test_the_budget_begins_before_the_function_is_lowered(self, executor, chain):
        kernel = Product("tests.program.slow_to_trace")

        def function(a):
            time.sleep(0.3)
            return executor(kernel, a, B)

        result = tune(function, A, chooser=chain, tuner=QUICK, budget_s=0.25)
        assert len(result) == 0
        assert len(result.left_out) == 1
        assert "tests.program.slow_to_trace forward" in result.left_out[0]

    def test_a_program_without_calls(self, chain):
        assert len(tune(lambda x: x + 1, A, chooser=chain)) == 0

    @pytest.mark.parametrize(
        ("function", "kwargs", "message"),
        [
            (3, {}, "3"),
            (jnp.sin, {"tuner": 3}, "tuner=3"),
            (jnp.sin, {"budget_s": -1}, "budget_s=-1"),
            (jnp.sin, {"chooser": 3}, "chooser=3"),
            (jnp.sin, {"on_event": 3}, "on_event=3"),
        ],
    )
    def test_wrong_input(self, function, kwargs, message):
        with pytest.raises((TypeError, ValueError), match=message):
            tune(function, A, **kwargs)


class TestConfirming:
    """The caller's own program with what was chosen and without."""

    @pytest.mark.parametrize("how", ["plain", "jit", "donating"])
    def test_it_runs_the_program_both_ways_on_copies(self, executor, chain, how):
        kernel = Product("tests.program.confirmed")
        seen = []

        def program(a, count):
            jax.debug.callback(lambda _: seen.append(1), a)
            return executor(kernel, a, B) * count

        function = {"plain": program, "jit": jax.jit(program), "donating": jax.jit(program, donate_argnums=0)}[how]
        a = jnp.array(A)
        result = tune(function, a, 2.0, chooser=chain, tuner=QUICK, confirm=True)
        both = result.confirmation
        assert len(both.tuned.samples_ms) == len(both.untuned.samples_ms) == 5
        assert len(seen) == 12
        assert not a.is_deleted()
        assert "with the winners" in str(both)

    def test_a_program_that_became_slower_is_said_to_be(self, caplog):
        with caplog.at_level("INFO", logger="tilewright"):
            slower = Confirmation(Timing((2.0, 2.0, 2.1)), Timing((1.0, 1.0, 1.1)))
            faster = Confirmation(slower.untuned, slower.tuned)
            alike = Confirmation(Timing((1.01,)), Timing((1.0,)))
        assert (slower.is_slower, faster.is_slower, alike.is_slower) == (True, False, False)
        assert faster.speedup == pytest.approx(2.0)
        assert "slower" in str(slower)
        assert "2×" in str(faster)

    @pytest.mark.parametrize(
        ("function", "args"),
        [
            (jnp.sin, (jax.ShapeDtypeStruct((4,), jnp.float32),)),
            (lambda: jax.jit(jnp.sin).lower(A), ()),
        ],
        ids=["shapes", "lowered"],
    )
    def test_what_cannot_run_is_refused_before_anything_is_tuned(self, chain, function, args):
        given = function() if not args else function
        with pytest.raises(ValueError, match="confirm=True runs the program"):
            tune(given, *args, chooser=chain, confirm=True)
        assert len(chain.cache) == 0
