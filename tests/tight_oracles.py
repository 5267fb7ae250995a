"""Exact curves of composed steps, and copies of laws.py and tight.py in which a line is changed.

A law is (shifts, weights, count): a step whose mean is one of these shifts, at these odds, so often.
"""

import inspect
import sys
from types import ModuleType
from typing import NamedTuple

import mpmath as mp
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, sparse, special

from indpriv.accountant import laws, tight

DIRECTIONS = ["remove", "add"]


class Files(NamedTuple):
    laws: ModuleType
    tight: ModuleType


OURS = Files(laws, tight)
# Constants with which small errors are seen: by default log delta has a slack of 5e-5
SHARP = [
    ("tight", "ABOVE = 5e-5, 9.0", "ABOVE = 1e-7, 16.0"),
    ("tight", "_CUT = 1e-5", "_CUT = 1e-9"),
    ("laws", "_CELL = 1 / 40", "_CELL = 1 / 1024"),
]


def copied(monkeypatch, changes):
    """Both files with lines changed: (file, old, new). Old text has to be there."""
    text = {name: inspect.getsource(getattr(OURS, name)) for name in Files._fields}
    for name, old, new in changes:
        assert old in text[name], old
        text[name] = text[name].replace(old, new)
    text["tight"] = text["tight"].replace("indpriv.accountant.laws", "changed_laws")
    found = []
    for name in Files._fields:
        module = ModuleType(f"changed_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text[name], module.__name__, "exec"), module.__dict__)
        found.append(module)
    return Files(*found)


def sampled(shift, rate, count=1):
    return [0.0, shift], [1 - rate, rate], count


def pair(files, law, direction):
    shifts, weights = np.array(law[0], float)[None], np.array(law[1], float)[None]
    mixture = files.laws.Mixture(shifts, weights, np.zeros(1))
    centred = files.laws.Mixture.centred(1)
    return (mixture, centred) if direction == "remove" else (centred, mixture.mirrored())


def run_of(files, pairs, counts, delta, *, below=False, squares=0.0):
    """Losses of kinds of step, one law each, and what examples met: counts (n, n_kinds)."""
    counts = np.atleast_2d(np.asarray(counts, float))
    most = float(counts.sum(axis=1).max())
    tail = files.laws.tail_of(delta, most)
    cells = files.laws.Cells.joined([files.laws.cells_of(*p, tail, below=below) for p in pairs])
    return losses_of(files, cells, squares), files.tight.Met.of(sparse.csr_array(counts))


def losses_of(files, cells, squares=0.0):
    kinds = sparse.csr_array(np.eye(len(cells)))
    return files.tight.Losses(cells, kinds, np.zeros(len(cells)) + squares, kinds)


def composed(files, steps, delta, direction, *, below=False):
    """The run of one example that met these laws."""
    counts = [law[2] for law in steps]
    return run_of(files, [pair(files, s, direction) for s in steps], counts, delta, below=below)


def gaussian_delta(mu, epsilon):
    """In 50 digits."""
    with mp.workdps(50):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def one_step_delta(shifts, weights, epsilon, direction):
    """Of one step, in 60 digits: both laws beyond the one z where the loss is epsilon."""
    with mp.workdps(60):
        shifts, sign = [mp.mpf(x) for x in shifts], -1 if direction == "remove" else 1
        weights = [mp.mpf(x) for x in weights]
        weights[0] += 1 - mp.fsum(weights)
        level = mp.exp(-sign * mp.mpf(epsilon))
        z = -mp.inf
        if weights[0] < level:
            terms = [(w, x) for w, x in zip(weights, shifts, strict=True) if w > 0]
            # Each term alone reaches the level at its own z, and their sum before all of these
            ends = [mp.log(level / w) / x + x / 2 for w, x in terms if x > 0]
            z = min(ends)  # from here Newton's method on a convex function falls to the root
            for _ in range(200):
                each = [w * mp.exp(x * z - x * x / 2) for w, x in terms]
                slope = mp.fsum(x * e for e, (_, x) in zip(each, terms, strict=True))
                step = mp.log(mp.fsum(each) / level) * mp.fsum(each) / slope
                z -= step
                if abs(step) <= abs(z) * mp.mpf(10) ** -52:
                    break
        without = mp.ncdf(sign * z)
        with_ = mp.fsum(w * mp.ncdf(sign * (z - x)) for w, x in zip(weights, shifts, strict=True))
        bound = mp.exp(mp.mpf(epsilon))
        return with_ - bound * without if sign < 0 else without - bound * with_


class Inverted:
    """delta(epsilon) of composed laws, by trapezoid sums of what is analytic: no cells, no lattice.

    E exp(z L) of each law is a sum over the noise; delta is the inverse of their product.
    """

    def __init__(self, steps, direction, gaussian=0.0):
        self.steps, self.direction, self.gaussian = steps, direction, gaussian

    def log_moments(self, z):
        """(n,) log E exp(z L), up to a multiple of 2 pi i, at complex z with one real part."""
        power = z + 1 if self.direction == "remove" else -z
        total = self.gaussian / 2 * z * (z + 1)
        for shifts, weights, count in self.steps:
            shifts, weights = np.array(shifts), np.array(weights)
            end = 12 + shifts.max() * (2 + max(power[0].real, 0))
            width = min(1 / 32, 1 / (2 + np.abs(power.imag).max() * shifts.max()))
            low = -12 - np.sqrt(2 * max(-power[0].real, 0) * -np.log(max(weights[0], 1e-300)))
            noise = np.arange(low, end, width)
            exponent = noise[:, None] * shifts - shifts**2 / 2
            ratio = special.logsumexp(exponent, b=weights, axis=1)
            base = power[0].real * ratio - noise**2 / 2
            terms = np.exp(base - base.max()) * width / np.sqrt(2 * np.pi)
            kept = terms > 1e-18
            found = np.array([terms[kept] @ np.exp(1j * y * ratio[kept]) for y in power.imag])
            total = total + count * (np.log(found) + base.max())
        return total

    def delta(self, epsilon):
        """Its relative error is about 1e-9."""
        tilts = np.geomspace(0.02, 300, 41)
        psi = np.array([self.log_moments(np.array([t + 0j]))[0].real for t in tilts])
        best = int(np.argmin(psi - tilts * epsilon - np.log(tilts) - np.log1p(tilts)))
        tilt, log_delta = (
            tilts[best],
            psi[best] - tilts[best] * epsilon - 3 - 2 * np.log1p(tilts[best]),
        )
        far = (psi[best + 1 :] - tilts[best + 1 :] * epsilon - log_delta + 25) / (
            tilts[best + 1 :] - tilt
        )
        period = max((25 - log_delta) / tilt, far.min())
        total, start, block = 0.0, 0, 64
        while True:
            z = tilt + 2j * np.pi / period * np.arange(start, start + block)
            terms = np.exp(self.log_moments(z) - z * epsilon - psi[best] + tilt * epsilon)
            terms = terms / (z * (z + 1)) * np.where(z.imag > 0, 2, 1) / period
            total += terms.real.sum()
            if np.abs(terms[-8:]).max() < 1e-13 * total:
                return total * np.exp(psi[best] - tilt * epsilon)
            start += block
            assert start < 20_000, "these laws are too rough to invert"


def true_positive_rate(delta_at, rate):
    """The least of delta(epsilon) + exp(epsilon) rate at epsilons of 0 to 6, the best power."""
    return optimize.minimize_scalar(
        lambda e: delta_at(e) + np.exp(e) * rate, bounds=(0, 6), options={"xatol": 1e-5}
    ).fun


def peer(steps, *, pessimistic):
    """Epsilons of dp_accounting, of the worse direction: get_epsilon_for_delta."""
    found = None
    for (_, shift), (_, rate), count in steps:
        one = pld.from_gaussian_mechanism(
            1 / shift,
            sampling_prob=rate,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        ).self_compose(count)
        found = one if found is None else found.compose(one)
    return found
