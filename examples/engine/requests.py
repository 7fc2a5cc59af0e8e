"""What is asked of the engine, and why it may refuse."""

import dataclasses
from collections.abc import Callable
from typing import Literal

type FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that can never be served."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class EngineStopped(RuntimeError):
    """The engine does not run any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a request are drawn.

    Attributes:
      temperature: 0 takes the likeliest token.
      top_k: the number of likeliest tokens to draw from; 0 for all.
      top_p: the least mass of the likeliest tokens to draw from; 1 for all.
      min_p: the least probability of a token relative to the likeliest one's.
      seed: with the text before, the whole of what decides a token: neither other requests nor the draft change it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise RequestError(f"temperature must be from 0 to 100, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k must be from 0 to 2**31 − 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 0 <= self.seed < 2**31:
            raise RequestError(f"seed must be from 0 to 2**31 − 1, got {self.seed}")

    @property
    def limited(self) -> bool:
        """Whether some tokens are ruled out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what was written after it.

    Attributes:
      stop_tokens: each of these ends the answer, of which it is the last token.
      listener: called with the request after each of its tokens and at its end, in the thread of the engine.
      log_probs: of each token of the answer, under the distribution it was drawn from.
      reused: tokens of the prompt whose pages were found in the cache.
      finish_reason: None while it waits or runs.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    listener: Callable[["Request"], None] | None = None
    answer: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    reused: int = 0
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer
