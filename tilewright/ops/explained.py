"""An explained program: the choices of its kernel calls, as text and as HTML."""

import collections
import dataclasses
import html
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tilewright.ops.executor import ExplainedChoice, chosen_lines, other_lines
from tilewright.ops.types import Device

_EXTRA = re.compile(r"tilewright\[(\w+)\]")
"""The extra of this package that a reason against a backend names."""

_NEEDS = {"gpu": re.compile(r"needs a (CUDA )?GPU\b"), "tpu": re.compile(r"needs a TPU\b")}
"""The reason against a backend on a device of another kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedCall:
    """One kernel call of a program, in one direction.

    Attributes:
      arguments: the call's arrays and options in short form.
      split: if it is a device's part of a call that is split over automatic mesh axes: into how many parts each operand
        is split along each dimension.
      gathered: operands of which each device needs more than it has, and along which dimension.
      times: the number of times that a run of the program runs it; a loop whose steps are unknown counts as one.
    """

    op: str
    arguments: str
    choice: ExplainedChoice
    split: str = ""
    gathered: tuple[str, ...] = ()
    times: int = 1

    @property
    def direction(self) -> str:
        return self.choice.direction

    @property
    def config(self) -> Any:
        return self.choice.config

    @property
    def step(self) -> str:
        return self.choice.step

    def __str__(self) -> str:
        return "\n".join(_Both((self,)).lines(()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Both:
    """A call in the directions that a program has of it, which are printed together.

    Attributes:
      calls: one or more with the same arguments, in the order of the program.
    """

    calls: tuple[ExplainedCall, ...]

    def lines(self, unsaid: Collection[str]) -> list[str]:
        """The text, without the backends ``unsaid``, which are named elsewhere."""
        return [
            *self.subject,
            *(f"  {line}" for line in (*chosen_lines(self.choices), *other_lines(self.choices, unsaid))),
        ]

    @property
    def choices(self) -> list[ExplainedChoice]:
        return [call.choice for call in self.calls]

    @property
    def subject(self) -> list[str]:
        """The op with its arguments, and the split over devices."""
        call = self.calls[0]
        times = f" × {call.times}" if call.times > 1 else ""
        split = [f"  a device's part: {call.split or 'all of it'}"] if call.split or call.gathered else []
        gathered = [f"  gathered on each device: {', '.join(call.gathered)}"] if call.gathered else []
        return [f"{call.op}{times} of {call.arguments}", *split, *gathered]


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramExplanation:
    """The configs that the kernel calls of a program would run with; iterable by call, and readable when printed.

    Attributes:
      calls: one for each call and direction, in the order of the program.
      device: the device that they are for.
      packages: what was taken for installed there (``extras`` of ``target_device``).
    """

    calls: tuple[ExplainedCall, ...]
    device: Device
    packages: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[ExplainedCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> ExplainedCall:
        return self.calls[index]

    def __str__(self) -> str:
        if not self.calls:
            return "no call of a kernel of tilewright"
        every = [line for both in self._calls for line in both.lines(self._of_other_kinds)]
        return "\n".join([self.head, *every, *self.summary])

    @property
    def head(self) -> str:
        """The device that the explanation is for, and what is taken for installed there."""
        installed = f", with {', '.join(sorted(self.packages))} installed there" if self.packages else ""
        return f"on {self.device.name}{installed}"

    @property
    def _calls(self) -> list[_Both]:
        """The calls, both directions of each together."""
        found: dict[Any, list[ExplainedCall]] = {}
        seen: collections.Counter[Any] = collections.Counter()
        for call in self.calls:
            key = (call.op, call.arguments, call.split, call.gathered, call.times)
            # Of calls that differ only in a given config, each has its own text.
            found.setdefault((key, seen[key, call.direction]), []).append(call)
            seen[key, call.direction] += 1
        return [_Both(tuple(same)) for same in found.values()]

    def _need(self, kind: str) -> list[str]:
        """The backends that need a kind of device, if the device is none."""
        rejected = [item for call in self.calls for item in call.choice.rejected.items()]
        names = [name for name, why in rejected if any(map(_NEEDS[kind].match, why))]
        return [] if self.device.kind == kind else list(dict.fromkeys(names))

    @property
    def _of_other_kinds(self) -> list[str]:
        """The backends for other kinds of devices, of which no call says so again."""
        return [name for kind in _NEEDS for name in self._need(kind)]

    @property
    def summary(self) -> list[str]:
        """The backends that need a GPU, the calls by backend, and the packages that would give some another one."""
        found = []
        if names := self._need("gpu"):
            need = "needs" if len(names) == 1 else "need"
            found.append(
                f"there is no GPU, which {_listed(names)} {need}; tilewright.target_device explains for one elsewhere"
            )
        if len(self.calls) < 2:
            return found
        backends = collections.Counter(str(call.config).partition("(")[0] for call in self.calls)
        found.append(f"{len(self.calls)} calls: {', '.join(f'{n} on {name}' for name, n in backends.most_common())}")
        missing: dict[str, list[str]] = {}
        for call in self.calls:
            for name, why in call.choice.rejected.items():
                extras = {extra for reason in why for extra in _EXTRA.findall(reason)}
                # Of other reasons no package helps.
                if extras and all(_EXTRA.search(reason) for reason in why):
                    missing.setdefault(min(extras), []).append(name)
        for extra, names in sorted(missing.items()):
            backend = "/".join(dict.fromkeys(names))
            found.append(f"pip install 'tilewright[{extra}]' would let {len(names)} of them run on {backend}")
        return found

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        if not self.calls:
            return f"<p>{self}</p>"
        rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in ('call', 'config', 'why no other'))}</tr>"]
        for both in self._calls:
            lines = chosen_lines(both.choices), other_lines(both.choices, self._of_other_kinds)
            shown = map(_escaped, (both.subject, *lines))
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>")
        return f"<p>{_escaped([self.head])}</p><table>{''.join(rows)}</table><p>{_escaped(self.summary)}</p>"


def _escaped(lines: Sequence[str]) -> str:
    return "<br>".join(map(html.escape, lines))


def _listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
