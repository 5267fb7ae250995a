import re

import numpy as np

from indpriv.analysis.schedule import Drivers
from indpriv.report.figures import norms_over_training


def figure(norms, names):
    lines = tuple(tuple(float(value) for value in line) for line in norms)
    steps = tuple(range(len(lines[0])))
    shares = tuple(tuple(0.5 for _ in steps) for _ in lines)
    return norms_over_training(
        Drivers(steps, tuple(names), lines, shares[0], shares, most_protected=(), least_protected=(), n_at_least=1, n_at_most=1)
    )  # fmt: skip


def test_no_line_runs_through_the_names_of_ten_classes():
    names = [f"class {letter}" for letter in "abcdefghij"]
    svg = figure(np.random.default_rng(0).uniform(0.01, 5, (10, 50)), names)
    lines = re.findall(r'<path d="([^"]+)" clip-path', svg)
    assert len(lines) >= 21  # two panels of ten classes, and all examples
    right = max(float(x) for line in lines for x in re.findall(r"[ML] ([\d.]+) ", line))
    for name in names:
        text = re.search(rf"<text [^>]*>{name}</text>", svg)[0]
        assert float(re.search(r"(?:translate\(| x=\")([\d.]+)", text)[1]) > right


def test_norms_within_a_decade_have_a_scale():
    svg = figure([[1.4, 0.9, 0.4], [1.1, 0.5, 0.25]], ["0", "1"])
    ticks = re.findall(r"<text [^>]*>(0\.2|0\.5|1|2)</text>", svg)
    assert {"0.5", "1"} <= set(ticks)
