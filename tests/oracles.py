"""Reference implementations of fast formulas: slow and obvious, written for reading."""

import itertools
import math

import mpmath
import numpy as np
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
        return float(
            mpmath.log1p(mpmath.quad(integrand, [mpmath.mpf(float(k)) for k in knots])) / (a - 1)
        )


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


def rdp_epsilon(
    relative_norms, noise_multiplier, sample_rate, delta, orders, conversion="canonne2020"
):
    """Epsilon of one example from its relative norm in each step, by Opacus's divergences and the textbook formulas."""
    total = np.zeros(len(orders))
    noise, rate = (
        np.broadcast_to(x, (len(relative_norms),)) for x in (noise_multiplier, sample_rate)
    )
    for s, sigma, q in zip(relative_norms, noise, rate, strict=True):
        if s > 0:
            total += [
                opacus_rdp._compute_rdp(float(q), float(sigma / s), order) for order in orders
            ]
    bounds = []
    for order, rdp in zip(orders, total, strict=True):
        if conversion == "mironov2017":
            bounds.append(rdp + math.log(1 / delta) / (order - 1))
        else:
            bounds.append(
                rdp
                + math.log((order - 1) / order)
                - (math.log(delta) + math.log(order)) / (order - 1)
            )
    return max(min(bounds), 0.0) if total.any() else 0.0


def gaussian_epsilon(mu, delta):
    """Exact epsilon of a Gaussian mechanism with sensitivity / noise = mu (Balle and Wang 2018, Theorem 8)."""
    if mu == 0:
        return 0.0

    def excess(epsilon):
        upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return (
            math.exp(special.log_ndtr(upper)) - math.exp(epsilon + special.log_ndtr(lower)) - delta
        )

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
        without = mpmath.ncdf(
            side * z
        )  # mass beyond the threshold, where the loss is larger than epsilon
        with_ = (1 - q) * without + q * mpmath.ncdf(side * (z - shift))
        return float(with_ - bound * without if side < 0 else without - bound * with_)


def laws_of_rounded_losses(steps, width):
    """Laws of the sum of losses, each rounded to a multiple of width, with and without the example, rising in the loss.

    Rounding is something that an attacker may do, so that no attack on these laws beats one on the run. steps are
    (relative_norm, noise, rate, count); losses more than 45 beyond those of z = +-9 fall into the outer bins.
    """
    with_, without = np.ones(1), np.ones(1)
    for relative_norm, noise_multiplier, rate, count in steps:
        shift = relative_norm / noise_multiplier

        def loss(z, shift=shift, rate=rate):
            return np.logaddexp(
                np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + z * shift - shift**2 / 2
            )

        edges = (
            width
            * (np.arange(np.floor(loss(-9) / width), np.ceil(loss(9 + shift) / width) + 1) + 0.5)[
                :-1
            ]
        )
        inner = (np.expm1(edges) + rate) / rate
        z = np.where(
            inner > 0, np.log(np.where(inner > 0, inner, 1.0)) / shift + shift / 2, -np.inf
        )
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
            law = (
                mpmath.npdf(z)
                if sign < 0
                else (1 - q) * mpmath.npdf(z) + q * mpmath.npdf(z - shift)
            )
            return law * one_step_delta(*second, epsilon - sign * mpmath.log(ratio), direction)

        knots = [
            z
            for centre in (0, shift)
            for z in (centre - 12, centre - 6, centre - 2, centre + 2, centre + 6, centre + 12)
        ]
        if second[2] < 1:  # where the second step's losses end
            inner = (
                mpmath.exp(sign * mpmath.mpf(epsilon)) / (1 - mpmath.mpf(second[2])) - 1 + q
            ) / q
            knots += [mpmath.log(inner) / shift + shift / 2] if inner > 0 else []
        knots = sorted(z for z in knots if -12 <= z <= shift + 12)
        return float(mpmath.quad(integrand, knots, maxdegree=7))


def governing_norms_with_free(
    rows, recorded_steps, entries, total_steps, max_grad_norm, between_records
):
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
            result[step, example] = min(
                max(known[taken] for taken in chosen) / max_grad_norm[step], 1.0
            )
    return result


def law_of_sum(shifts, sample_rate):
    """(2^k,) sums of the sampled ones among k rows, and their probabilities: one entry for each set of rows."""
    sums, weights = np.zeros(1), np.ones(1)
    for shift in shifts:
        sums = np.concatenate([sums, sums + shift])
        weights = np.concatenate([weights * (1 - sample_rate), weights * sample_rate])
    return sums, weights


def log_moment_of_mixture(sums, weights, power):
    """Log E_Q[(P/Q)^power] for Q = N(0, 1), P the mixture of N(sum, 1); any real power, by a fine sum in the log domain."""
    return log_moment_of_log_weights(sums[weights > 0], np.log(weights[weights > 0]), power)


def log_moment_of_log_weights(sums, log_weights, power):
    """The same from the logs of weights, which may be smaller than a float can be."""
    nothing = special.logsumexp(log_weights[sums == 0])
    reach = 14 + max(power, 0) * sums.max() + np.sqrt(2 * max(-power, 0) * -nothing)
    step = 1 / 16 / max(1.0, np.diff(np.unique(sums)).max(initial=0))  # f has no zero near the axis
    parts = np.array_split(
        np.arange(-reach, reach, step), 1 + int(2 * reach / step * len(sums) / 1e6)
    )
    log_f = [
        special.logsumexp(log_weights + z[:, None] * sums - sums**2 / 2, axis=1) for z in parts
    ]
    z = np.concatenate(parts)
    return special.logsumexp(power * np.concatenate(log_f) - z**2 / 2) + np.log(
        step / np.sqrt(2 * np.pi)
    )


def unit_divergence(shifts, sample_rate, order):
    """Rényi divergence of one step of a unit whose rows have these norms over the noise: all sets of its rows."""
    return log_moment_of_mixture(*law_of_sum(shifts, sample_rate), order) / (order - 1)
