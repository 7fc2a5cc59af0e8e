"""The picture of the README shows the recorded figures, losses among them."""

import xml.etree.ElementTree as ElementTree

from benchmarks import speed_picture
from benchmarks.attention_peers import DIRECTIONS

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_picture_is_that_of_the_records() -> None:
    drawn = speed_picture.picture(*speed_picture.records())
    assert speed_picture.PICTURE.read_text(encoding="utf-8") == drawn, "run make picture"


def test_it_shows_every_figure_and_nothing_is_cut_off() -> None:
    beside, tuned = speed_picture.records()
    root = ElementTree.fromstring(speed_picture.picture(beside, tuned))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    rates = speed_picture.rates(beside, tuned)
    for case in speed_picture.CASES:
        for direction in DIRECTIONS:
            shown = rates[case, direction]
            assert all(0 < rate < 1.05 * speed_picture.SCALE for rate in shown.values())
            assert all(f"{rate:.0f}" in texts for rate in shown.values())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.attrib.get("x", 0)), float(box.attrib.get("y", 0))
        assert x >= 0 <= y
        assert x + float(box.attrib["width"]) <= width
        assert y + float(box.attrib["height"]) <= height
    background = next(root.iter(f"{SVG}rect"))
    assert (background.attrib["width"], background.attrib["fill"]) == (root.attrib["width"], "#ffffff")
