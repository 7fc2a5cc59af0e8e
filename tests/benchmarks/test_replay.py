"""The replay of recorded tunings: other searches over the same samples."""

import numpy as np
import pytest

from benchmarks.replay import replay
from tilewright.ops.config.results import TunedCall
from tilewright.ops.kernel.candidates import Candidate


def test_halving_takes_fewer_samples_and_finds_the_same():
    generator = np.random.default_rng(0)
    for _ in range(20):
        times = [1.0, *generator.uniform(0.6, 1.6, 60)]
        candidates = tuple(
            Candidate(i, tuple(t * generator.lognormal(0, 0.01, 40)), "passed", heuristic=i == 0)
            for i, t in enumerate(times)
        )
        call = TunedCall("op", "forward", "key", "", candidates, 0)
        quick, few = replay(call, "halving", iters=16)
        slow, many = replay(call, "exhaustive", iters=16)
        assert few < 0.7 * many
        assert times[quick.chosen] <= 1.02 * times[slow.chosen]
        assert times[quick.chosen] <= 1.02 * min(times)
        assert quick.regret is not None
        assert quick.regret < 0.02


def test_a_replay_of_failures_is_an_error():
    call = TunedCall("op", "forward", "key", "", (Candidate(0, error="it died"),), 0)
    with pytest.raises(ValueError, match="no candidate of op"):
        replay(call)


def test_a_replay_leaves_out_what_was_dropped():
    dropped = Candidate(1, (), "dropped", "it cannot run: no room for it")
    call = TunedCall("op", "forward", "key", "", (Candidate(0, (1.0,), "passed", heuristic=True), dropped), 0)
    assert replay(call)[0].candidates[1] == dropped
