"""The colours of lines in a chart: apart for every kind of colour vision, in both themes."""

import itertools
import re

import numpy as np
import pytest

from rallypoint.page.answers import STATIC

# What is seen without one kind of cones, in linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1).
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(1)


def in_lab(colour, sight):
    """Return a colour such as #0072b2 in CIELAB as somebody sees it."""
    shares = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.asarray(SIGHT[sight]) @ linear, 0, 1) / WHITE
    cubes = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * cubes[1] - 16, 500 * (cubes[0] - cubes[1]), 200 * (cubes[1] - cubes[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_are_apart_for_every_kind_of_colour_vision(theme, sight):
    names = re.search(r"LINES = \[(.*?)\]", (STATIC / "charts.js").read_text()).group(1).replace('"', "").split(", ")
    css = (STATIC / "page.css").read_text()
    part = css.split("prefers-color-scheme")[0] if theme == "light" else css.split('[data-theme="dark"] {')[1]
    seen = {name: in_lab(re.search(rf"--{name}: (#\w{{6}})", part).group(1), sight) for name in names}
    apart = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in itertools.combinations(names, 2)}
    assert min(apart.values()) > 10, apart
