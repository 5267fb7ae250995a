"""Slow, obvious twins of fast formulas: written for reading, not for speed. Append your own; change nobody else's."""

import itertools
import math

import mpmath
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import optimize, signal, special, stats


def rdp_of_one_step(relative_norm, noise_multiplier, sample_rate, order):
    """One Rényi divergence by 40-digit quadrature of its definition, split at the peaks of the integrand."""
    with mpmath.workdps(40):
        shift = mpmath.mpf(float(relative_norm)) / mpmath.mpf(float(noise_multiplier))
        q, a = mpmath.mpf(float(sample_rate)), mpmath.mpf(float(order))

        def integrand(z):
            f = 1 - q + q * mpmath.exp(z * shift - shift**2 / 2)
            return (f**a - 1 - a * (f - 1)) * mpmath.npdf(z)

        end = float(a * shift) + 14
        knots = [-20, *np.linspace(-14, end, 2 + int((end + 14) / 2)), end + 8]
        return float(mpmath.log1p(mpmath.quad(integrand, [mpmath.mpf(float(k)) for k in knots])) / (a - 1))


def governing_norms(norms, recorded_steps, total_steps, max_grad_norm, between_records):
    """(total_steps, n_examples) relative norms in effect at each step, one step and one example at a time."""
    norms, max_grad_norm = np.asarray(norms, float), np.broadcast_to(max_grad_norm, (total_steps,))
    result = np.ones((total_steps, norms.shape[1]))
    for step in range(total_steps):
        earlier = [row for row, recorded in enumerate(recorded_steps) if recorded <= step]
        if not earlier:
            continue
        if between_records == "last":
            rows = earlier[-1:]
        elif between_records == "worst_case":
            rows = [row for row in earlier if recorded_steps[row] == step]
        else:
            distance = [abs(recorded - step) for recorded in recorded_steps]
            rows = [row for row, away in enumerate(distance) if away == min(distance)]
        if rows:
            result[step] = np.minimum(norms[rows].max(axis=0) / max_grad_norm[step], 1.0)
    return result


def rdp_epsilon(relative_norms, noise_multiplier, sample_rate, delta, orders, conversion="canonne2020"):
    """Epsilon of one example from its relative norm in each step, by Opacus's divergences and the textbook formulas."""
    total = np.zeros(len(orders))
    noise, rate = (np.broadcast_to(x, (len(relative_norms),)) for x in (noise_multiplier, sample_rate))
    for s, sigma, q in zip(relative_norms, noise, rate, strict=True):
        if s > 0:
            total += [opacus_rdp._compute_rdp(float(q), float(sigma / s), order) for order in orders]
    bounds = []
    for order, rdp in zip(orders, total, strict=True):
        if conversion == "mironov2017":
            bounds.append(rdp + math.log(1 / delta) / (order - 1))
        else:
            bounds.append(rdp + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return max(min(bounds), 0.0) if total.any() else 0.0


def gaussian_epsilon(mu, delta):
    """Exact epsilon of a Gaussian mechanism with sensitivity / noise = mu (Balle and Wang 2018, Theorem 8)."""
    if mu == 0:
        return 0.0

    def excess(epsilon):
        upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return math.exp(special.log_ndtr(upper)) - math.exp(epsilon + special.log_ndtr(lower)) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))


def one_step_delta(relative_norm, noise_multiplier, sample_rate, epsilon, direction):
    """Hockey-stick divergence of one Poisson-sampled step: the mass above its one threshold on z, in 50 digits."""
    with mpmath.workdps(50):
        shift, q = mpmath.mpf(relative_norm) / mpmath.mpf(noise_multiplier), mpmath.mpf(sample_rate)

        def threshold(ratio):  # the z at which the density ratio with / without takes this value
            inner = (ratio - 1 + q) / q
            return mpmath.log(inner) / shift + shift / 2 if inner > 0 else -mpmath.inf

        bound = mpmath.exp(mpmath.mpf(epsilon))
        z, side = (threshold(bound), -1) if direction == "remove" else (threshold(1 / bound), 1)
        without = mpmath.ncdf(side * z)  # mass beyond the threshold, where the loss is larger than epsilon
        with_ = (1 - q) * without + q * mpmath.ncdf(side * (z - shift))
        return float(with_ - bound * without if side < 0 else without - bound * with_)


def composed_loss(steps, interval):
    """dp_accounting's discretised loss of a run, always pessimistic: steps are (relative_norm, noise, rate, count)."""
    composed = None
    for relative_norm, noise_multiplier, sample_rate, count in steps:
        part = privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier / relative_norm, sampling_prob=sample_rate, value_discretization_interval=interval
        ).self_compose(count)
        composed = part if composed is None else composed.compose(part)
    return composed


def extrapolated(value_of, interval):
    """Limit for interval 0 of a pessimistic value that errs by its square, and how far the limit may be off.

    Connect-the-dots errs by a multiple of the squared interval once the interval is fine enough: three intervals, each
    half the last, give two extrapolated values, and the second differs from the limit by less than from the first, but
    for what the position of epsilon between grid points does: a tenth of what was extrapolated is granted to it.
    Where differences do not shrink fourfold nothing is known but that the finest value is not too small.
    """
    coarse, middle, fine = (value_of(interval * factor) for factor in (4, 2, 1))
    first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
    if 3 * abs(middle - fine) <= abs(coarse - middle) <= 5 * abs(middle - fine):
        return second, abs(second - first) + abs(fine - second) / 10
    return second, max(abs(second - first), abs(fine))


def laws_of_rounded_losses(steps, width):
    """Laws of the sum of losses, each rounded to a multiple of width, with and without the example, rising in the loss.

    Rounding is something that an attacker may do, so that no attack on these laws beats one on the run. steps are
    (relative_norm, noise, rate, count); losses more than 45 beyond those of z = +-9 fall into the outer bins.
    """
    with_, without = np.ones(1), np.ones(1)
    for relative_norm, noise_multiplier, rate, count in steps:
        shift = relative_norm / noise_multiplier

        def loss(z, shift=shift, rate=rate):
            return np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + z * shift - shift**2 / 2)

        edges = width * (np.arange(np.floor(loss(-9) / width), np.ceil(loss(9 + shift) / width) + 1) + 0.5)[:-1]
        inner = (np.expm1(edges) + rate) / rate
        z = np.where(inner > 0, np.log(np.where(inner > 0, inner, 1.0)) / shift + shift / 2, -np.inf)
        z = np.concatenate([[-np.inf], z, [np.inf]])
        plain, shifted = np.diff(special.ndtr(z)), np.diff(special.ndtr(z - shift))
        for _ in range(count):
            without = signal.fftconvolve(without, plain)
            with_ = signal.fftconvolve(with_, (1 - rate) * plain + rate * shifted)
    return np.maximum(with_, 0), np.maximum(without, 0)


def best_true_positive_rate(with_, without, false_positive_rate):
    """Neyman and Pearson: say "present" of the outcomes with the largest ratio of laws, as many as the rate allows."""
    order = np.argsort(-with_ / np.maximum(without, 1e-300), kind="stable")
    false, true = (np.append(0.0, np.cumsum(law[order])) for law in (without, with_))
    return float(np.interp(false_positive_rate, false, true))


def maxt_p_values(values, groups, strata, rng, permutations):
    """Westfall and Young's single-step maxT by shuffling whole strata, one permutation and one group at a time."""

    def statistics(shuffled):
        found = []
        for group in range(groups.max() + 1):
            total = variance = 0.0
            for stratum in np.unique(strata):
                inside = strata == stratum
                n, own = inside.sum(), (inside & (groups == group)).sum()
                total += (shuffled[inside & (groups == group)] - shuffled[inside].mean()).sum()
                variance += shuffled[inside].var(ddof=1) * own * (1 - own / n)
            found.append(abs(total) / np.sqrt(variance))
        return np.array(found)

    observed, reached = statistics(values), np.zeros(groups.max() + 1)
    for _ in range(permutations):
        shuffled = values.copy()
        for stratum in np.unique(strata):
            shuffled[strata == stratum] = rng.permutation(values[strata == stratum])
        reached += statistics(shuffled).max() >= observed * (1 - 1e-6)
    return (1 + reached) / (1 + permutations)


def permute_and_flip(distances, sensitivity, epsilon):
    """Chance of each candidate: in a random order, take each with a chance of its own until one is taken."""
    least = min(distances)
    accept = [math.exp(-epsilon * (distance - least) / (2 * sensitivity)) for distance in distances]
    orders = list(itertools.permutations(range(len(accept))))
    chance = [0.0] * len(accept)
    for order in orders:
        rejected = 1.0
        for candidate in order:
            chance[candidate] += rejected * accept[candidate] / len(orders)
            rejected *= 1 - accept[candidate]
    return chance


def rank_distance(people, cell, quantile):
    """Fewest people by which the quantile's rank lies outside the ranks of this cell, one person at a time."""
    below = sum(person < cell for person in people)
    within = sum(person <= cell for person in people)
    target = quantile * len(people)
    if target < below:
        return below - target
    return target - within if target > within else 0


def one_run_p_value(m, r, v, eps, delta):
    """P-value of v right of r guesses on m coins: Steinke, Nasr and Jagielski 2023, appendix D, as printed there."""
    q = 1 / (1 + math.exp(-eps))
    beta = stats.binom.sf(v - 1, r, q)
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        if total > i * alpha:
            alpha = total / i
    return min(beta + alpha * delta * 2 * m, 1.0)


def two_step_delta(first, second, epsilon, direction):
    """Delta of two steps (relative_norm, noise_multiplier, sample_rate): the second's curve over the first one's loss."""
    with mpmath.workdps(30):
        shift, q = mpmath.mpf(first[0]) / mpmath.mpf(first[1]), mpmath.mpf(first[2])
        sign = 1 if direction == "remove" else -1

        def integrand(z):
            ratio = 1 - q + q * mpmath.exp(z * shift - shift**2 / 2)
            law = mpmath.npdf(z) if sign < 0 else (1 - q) * mpmath.npdf(z) + q * mpmath.npdf(z - shift)
            return law * one_step_delta(*second, epsilon - sign * mpmath.log(ratio), direction)

        knots = [
            z
            for centre in (0, shift)
            for z in (centre - 12, centre - 6, centre - 2, centre + 2, centre + 6, centre + 12)
        ]
        if second[2] < 1:  # where the second step's losses end
            inner = (mpmath.exp(sign * mpmath.mpf(epsilon)) / (1 - mpmath.mpf(second[2])) - 1 + q) / q
            knots += [mpmath.log(inner) / shift + shift / 2] if inner > 0 else []
        knots = sorted(z for z in knots if -12 <= z <= shift + 12)
        return float(mpmath.quad(integrand, knots, maxdegree=7))


def composed_epsilon(steps, delta, n_points=(1 << 12, 1 << 15, 1 << 18)):
    """Epsilon of a run as dp_accounting's discretisation tends to it, and by how much that may be wrong.

    Tried with as many points as given until the value is good to 1e-5 relative; the surest one counts. Steps are
    (relative_norm, noise_multiplier, sample_rate, count).
    """
    truncated = 4e-15  # what dp_accounting cuts off and rounds, in delta
    ranges, variances = zip(*(_reach_of_one_step(*step[:3]) for step in steps), strict=True)
    spread = sum(step[3] * variance for step, variance in zip(steps, variances, strict=True)) ** 0.5
    span = 16 * spread + max(ranges)
    best = math.nan, math.inf
    for largest in n_points:
        interval, values = span / largest, {}
        for factor in (4, 2, 1):
            loss = composed_loss(steps, factor * interval)
            values[factor] = loss.get_epsilon_for_delta(delta)
        width = loss.get_epsilon_for_delta(delta - truncated) - loss.get_epsilon_for_delta(delta + truncated)
        limit, error = extrapolated(values.__getitem__, 1)
        best = min(best, (limit, error + width), key=lambda found: found[1])
        if best[1] <= 1e-5 * best[0]:
            break
    return best


def _reach_of_one_step(relative_norm, noise_multiplier, sample_rate):
    """How far apart the losses of one step lie, but for 1e-20 of them, and their variance."""
    shift = relative_norm / noise_multiplier
    z, width = np.linspace(-12, 12 + shift, 4001, retstep=True)
    ratio = 1 - sample_rate + sample_rate * np.exp(z * shift - shift**2 / 2)
    mass = width * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * ratio
    kept = mass > 1e-20
    loss, mass = np.log(ratio[kept]), mass[kept]
    return np.ptp(loss), mass @ (loss - mass @ loss) ** 2


def governing_norms_with_free(rows, recorded_steps, entries, total_steps, max_grad_norm, between_records):
    """(total_steps, n_examples) relative norms in effect, from full rows and free entries {(example, step): norm}."""
    max_grad_norm = np.broadcast_to(max_grad_norm, (total_steps,))
    result = np.ones((total_steps, np.shape(rows)[1]))
    for example in range(result.shape[1]):
        known = {step: norm for (i, step), norm in entries.items() if i == example}
        known |= {int(step): row[example] for step, row in zip(recorded_steps, rows, strict=True)}
        for step in range(total_steps):
            if not any(taken <= step for taken in known):
                continue
            if between_records == "last":
                chosen = [max(taken for taken in known if taken <= step)]
            else:
                nearest = min(abs(taken - step) for taken in known)
                chosen = [taken for taken in known if abs(taken - step) == nearest]
            result[step, example] = min(max(known[taken] for taken in chosen) / max_grad_norm[step], 1.0)
    return result
