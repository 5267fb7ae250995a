"""A hundred people, and how many of them an attacker finds."""

import math

_ACROSS, _STEP, _RADIUS = 20, 18, 6


def hundred_dots(share: float) -> str:
    """A hundred dots, the first ones filled: how many of a hundred a share is, rounded up."""
    found = min(100, math.ceil(100 * share))
    dots = "".join(
        f'<circle cx="{_STEP * (k % _ACROSS) + _RADIUS + 2}" '
        f'cy="{_STEP * (k // _ACROSS) + _RADIUS + 2}" r="{_RADIUS}" '
        f'fill="var(--{"warn" if k < found else "rule"})"/>'
        for k in range(100)
    )
    width, height = _STEP * _ACROSS, _STEP * (100 // _ACROSS)
    return (
        f'<svg class="dots" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'aria-label="{found} of 100 dots are filled">{dots}</svg>'
    )
