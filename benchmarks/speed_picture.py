"""Draws the picture of the README: recorded speeds of attention on an H100 beside other libraries, as SVG.

python -m benchmarks.speed_picture   # reads benchmarks/results/, writes docs/pictures/attention_h100.svg

The text of the SVG depends only on the records, so a test compares it with the committed file.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.attention_peers import DIRECTIONS, OURS
from benchmarks.common import RESULTS, recorded

PICTURE = RESULTS.parent.parent / "docs" / "pictures" / "attention_h100.svg"
FOLDER = "nvidia-h100-80gb-hbm3"
FA4 = "fa4"

CASES = {
    "full_4k_d128": ("full", "4 × 4096", "d 128"),
    "full_16k_d128": ("full", "1 × 16384", "d 128"),
    "causal_4k_d128": ("causal", "4 × 4096", "d 128"),
    "causal_16k_d128": ("causal", "1 × 16384", "d 128"),
    "causal_1k_d128": ("causal", "16 × 1024", "d 128"),
    "causal_gqa_8k_d128": ("causal, GQA", "2 × 8192", "d 128"),
    "causal_4k_d64": ("causal", "4 × 4096", "d 64"),
    "causal_4k_d256": ("causal", "4 × 4096", "d 256"),
    "window_16k": ("window 1024", "1 × 16384", "d 128"),
    "bias_4k": ("causal, bias", "1 × 4096", "d 128"),
    "d192_v128_4k": ("causal", "4 × 4096", "d 192, v 128"),
}
"""The cases that are drawn, each with the lines under its bars: mask, batch × length, head dim."""

SERIES = {OURS: "Tilewright", FA4: "FlashAttention-4 *", "cudnn": "cuDNN", "tokamax": "tokamax"}
COLOURS = {OURS: "#1b5fae", FA4: "#d9730d", "cudnn": "#5f8f1f", "tokamax": "#8577a8"}

WIDTH, PANEL, LEFT, TOP = 1180, 250, 62, 96
SCALE = 800  # the upper end of both axes, TFLOP/s


def records(results: Path = RESULTS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of ours, cuDNN and tokamax, and the one that has FlashAttention-4."""
    beside, tuned = (recorded(results / FOLDER / f"{name}.json") for name in ("attention", "attention_tuned"))
    return beside, tuned


def rates(beside: Mapping[str, Any], tuned: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """TFLOP/s of device time by case and direction, then by implementation; what was not timed is left out."""
    fa4 = {
        (cell["case"], cell["direction"]): statistics.median(cell["samples_ms"][FA4])
        for cell in tuned["cells"]
        if FA4 in cell["samples_ms"]
    }
    found = {}
    for cell in beside["cells"]:
        key = cell["case"], cell["direction"]
        timed = {name: each["tflops"] for name, each in cell["implementations"].items() if each["status"] == "timed"}
        if key in fa4:
            timed[FA4] = cell["flops"] / fa4[key] / 1e9
        found[key] = {name: timed[name] for name in SERIES if name in timed}
    return found


def _text(x: float, y: float, text: str, size: float, **attributes: str) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{given}>{escape(text)}</text>'


def _bars(x: float, base: float, width: float, values: Mapping[str, float]) -> Iterator[str]:
    """The bars of one case, each with its figure; the largest figure is bold."""
    largest = round(max(values.values()))
    for place, name in enumerate(SERIES):
        left = x + place * width
        middle = left + width / 2 + 4.2
        if name not in values:
            yield _text(left + width / 2, base - 4, "–", 12, text_anchor="middle", fill="#777777")
            continue
        height = values[name] / SCALE * PANEL
        size = f'width="{width - 1.4:g}" height="{height:.1f}"'
        yield f'<rect x="{left + 0.7:g}" y="{base - height:.1f}" {size} fill="{COLOURS[name]}"/>'
        weight = "bold" if round(values[name]) == largest else "normal"
        y = base - height - 4
        turned = f"rotate(-90 {middle:g} {y:.1f})"
        yield _text(
            middle, round(y, 1), f"{values[name]:.0f}", 12, transform=turned, font_weight=weight, fill="#1c1c1c"
        )


def _panel(top: float, heading: str, cells: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    base = top + PANEL
    for tick in range(0, SCALE + 1, 200):
        y = base - tick / SCALE * PANEL
        yield f'<line x1="{LEFT}" x2="{WIDTH - 14}" y1="{y:g}" y2="{y:g}" stroke="#dddddd"/>'
        yield _text(LEFT - 8, y + 4, str(tick), 12, text_anchor="end", fill="#444444")
    yield _text(LEFT, top - 30, heading, 16, font_weight="bold")
    yield _text(
        18,
        top + PANEL / 2,
        "TFLOP/s",
        13,
        text_anchor="middle",
        fill="#444444",
        transform=f"rotate(-90 18 {top + PANEL / 2:g})",
    )
    step = (WIDTH - 14 - LEFT) / len(cells)
    width = step * 0.84 / len(SERIES)
    for place, (case, values) in enumerate(cells.items()):
        x = LEFT + place * step + 0.08 * step
        yield from _bars(x, base, width, values)
        for line, text in enumerate(CASES[case]):
            yield _text(x + 0.42 * step, base + 17 + 15 * line, text, 12.5, text_anchor="middle")


def picture(beside: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    """The SVG of two records."""
    found = rates(beside, tuned)
    run, other = beside["runs"][0], tuned["runs"][0]
    versions = run["versions"]
    heights = [TOP + 58 + (PANEL + 108) * place for place in range(len(DIRECTIONS))]
    height = heights[-1] + PANEL + 62 + 54
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" fill="#1c1c1c">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 34, f"Attention on one {run['environment']['device']}, without tuning", 21, font_weight="bold"),
        _text(
            LEFT, 58, "bfloat16, TFLOP/s of device time, more is better; the fastest is bold. "
            "Batch × length and head dim stand under the bars.", 14, fill="#444444",
        ),
    ]  # fmt: skip
    x = float(LEFT)
    for name, label in SERIES.items():
        lines.append(f'<rect x="{x:g}" y="{TOP - 18}" width="14" height="14" fill="{COLOURS[name]}"/>')
        lines.append(_text(x + 20, TOP - 6, label, 14))
        x += 190
    for top, direction in zip(heights, DIRECTIONS, strict=True):
        heading = "Forward" if direction == "forward" else "Backward (alone)"
        lines += _panel(top, heading, {case: found[case, direction] for case in CASES})
    notes = (
        f"attention.json, {run['environment']['time'][:10]}: JAX {versions['jax']}, cuDNN "
        f"{versions['nvidia-cudnn-cu13']}, tokamax {versions['tokamax']}. A dash: no such option, or not measured.",
        f"* attention_tuned.json, {other['environment']['time'][:10]}: another run on an H100, called through "
        "Tilewright, which runs it where tuning or a table that ships finds it faster.",
    )
    for line, text in enumerate(notes):
        lines.append(_text(LEFT, height - 34 + 18 * line, text, 12.5, fill="#444444"))
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture(*records()), encoding="utf-8")


if __name__ == "__main__":
    main()
