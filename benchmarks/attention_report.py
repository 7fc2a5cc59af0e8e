"""What ``benchmarks.attention`` shows of its record: a table, a plot, and the figures published of what is not run."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_peers import DIRECTIONS, OURS

PUBLISHED: dict[str, Any] = {
    "implementation": "FlashAttention-4 (CuTe, sm90)",
    "device": "NVIDIA H100 80GB HBM3",
    "date": "2026-11-21",
    "note": "measured on another day, not in this run; a bf16 8192³ matrix product ran at 700 TFLOP/s then",
    "unit": "TFLOP/s",
    "forward": {
        "full_4k_d128": 662,
        "causal_4k_d128": 635,
        "causal_16k_d128": 639,
        "full_16k_d128": 690,
        "causal_gqa_8k_d128": 664,
        "causal_1k_d128": 373,
        "full_4k_d64": 513,
        "causal_4k_d64": 470,
        "causal_4k_d256": 696,
    },
    "backward": {
        "full_4k_d128": 620,
        "causal_4k_d128": 530,
        "causal_16k_d128": 610,
        "full_16k_d128": 628,
        "causal_gqa_8k_d128": 551,
        "causal_1k_d128": 309,
        "full_4k_d64": 523,
        "causal_4k_d64": 467,
        "causal_4k_d256": 296,
    },
}


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A line per cell: TFLOP/s of each implementation, and ours over the best peer's."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["implementations"]))
    widths = {name: max(13, len(name)) for name in names}
    heads = " ".join(f"{name:>{widths[name]}}" for name in names)
    lines = [f"{'case':20} {'':8} {heads} {'ours/best':>10} {'FA4*':>6}"]
    for cell in cells:
        found = cell["implementations"]
        shown = []
        for name in names:
            mine = found.get(name, {"status": "–"})
            shown.append(f"{mine['tflops']:.3g}" if mine["status"] == "timed" else mine["status"])
        ratio = ours_over_best(cell)
        published = PUBLISHED[cell["direction"]].get(cell["case"])
        lines.append(
            f"{cell['case']:20} {cell['direction']:8} "
            + " ".join(f"{text:>{widths[name]}}" for name, text in zip(names, shown, strict=True))
            + f" {'' if ratio is None else f'{ratio:.3f}':>10} {published or '':>6}"
        )
    return "\n".join([*lines, f"* {PUBLISHED['implementation']}, {PUBLISHED['date']}: {PUBLISHED['note']}"])


def ours_over_best(cell: Mapping[str, Any]) -> float | None:
    timed = {name: found["tflops"] for name, found in cell["implementations"].items() if found["status"] == "timed"}
    ours = timed.pop(OURS, None)
    return ours / max(timed.values()) if ours and timed else None


def plot(cells: Sequence[Mapping[str, Any]], path: Path, title: str, groups: Mapping[str, Container[str]]) -> None:
    """Grouped bars, a panel per group of cases and direction; a line over a group is the published figure."""
    import matplotlib

    matplotlib.use("Agg")  # an accelerator's machine has no display
    import matplotlib.pyplot as plt

    named = list(dict.fromkeys(name for cell in cells for name in cell["implementations"]))
    names = [n for n in named if any(c["implementations"].get(n, {}).get("status") == "timed" for c in cells)]
    panels = []
    for group, cases in groups.items():
        for direction in DIRECTIONS:
            mine = [cell for cell in cells if cell["case"] in cases and cell["direction"] == direction]
            if mine:
                panels.append((f"{group} cases, {direction}", mine))
    if not panels or not names:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(15, 3.6 * len(panels)), squeeze=False, layout="constrained")
    colours = {name: matplotlib.colormaps["tab10"](index) for index, name in enumerate(names)}
    width = 0.84 / len(names)
    for axis, (heading, mine) in zip(axes[:, 0], panels, strict=True):
        for place, cell in enumerate(mine):
            for index, name in enumerate(names):
                found = cell["implementations"].get(name, {"status": ""})
                if found["status"] == "timed":
                    x = place + (index - (len(names) - 1) / 2) * width
                    axis.bar(x, found["tflops"], 0.94 * width, color=colours[name])
                    axis.text(
                        x, found["tflops"], f" {found['tflops']:.3g}", rotation=90, ha="center", va="bottom", size=7
                    )
            published = PUBLISHED[cell["direction"]].get(cell["case"])
            if published:
                axis.hlines(published, place - 0.45, place + 0.45, colors="black", linestyles="dashed", linewidth=1)
        axis.set_title(heading, loc="left", size=10)
        axis.set_ylabel("TFLOP/s")
        axis.set_xticks(range(len(mine)), [cell["case"].replace("_", " ") for cell in mine], size=8)
        axis.set_xlim(-0.6, len(mine) - 0.4)
        axis.margins(y=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    labels = list(names)
    if any("hopper" in heading for heading, _ in panels):
        handles.append(plt.Line2D([], [], color="black", linestyle="dashed", linewidth=1))
        labels.append(f"{PUBLISHED['implementation']}, {PUBLISHED['date']}, not in this run")
    figure.suptitle(title, size=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def title(run: Mapping[str, Any]) -> str:
    """The title of the plot of a run."""
    environment, method = run["environment"], run["method"]
    return f"Attention on {environment['device']}, {environment['time'][:10]}: TFLOP/s of {method['device_time']} time"
