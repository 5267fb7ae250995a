"""How much privacy a mechanism loses at least, from many draws on two neighbouring data sets."""

import math
from collections import Counter

import numpy as np

from indpriv.analysis.statistics import clopper_pearson

MISTAKE = 1e-6  # chance that a private mechanism is found to lose more than it claims


def least_loss(draw, first, second, *, draws, delta=0.0):
    """A lower bound on epsilon that holds but for MISTAKE: events are chosen on half of the draws, judged on the other half.

    draw(data, n) gives n outcomes, which are hashable and in order.
    """
    halves = {}
    for side, data in (("first", first), ("second", second)):
        outcomes = draw(data, 2 * draws)
        halves[side] = outcomes[:draws], outcomes[draws:]
    best = 0.0
    for one, other in (("first", "second"), ("second", "first")):
        events = _likely_events(halves[one][0], halves[other][0])
        for event in events:
            hits = sum(outcome in event for outcome in halves[one][1])
            misses = sum(outcome in event for outcome in halves[other][1])
            confidence = 1 - MISTAKE / len(events)
            low, high = (
                clopper_pearson(hits, draws, confidence).low,
                clopper_pearson(misses, draws, confidence).high,
            )
            if low > delta:
                best = max(best, math.log((low - delta) / high))
    return best


def _likely_events(outcomes, others):
    """Events by likelihood ratio: the outcomes that speak most for one side, at several thresholds."""
    ours, theirs = Counter(outcomes), Counter(others)
    ratio = {outcome: (ours[outcome] + 0.5) / (theirs[outcome] + 0.5) for outcome in ours | theirs}
    cuts = np.unique(np.quantile(list(ratio.values()), [0.5, 0.7, 0.8, 0.9, 0.95])) if ratio else []
    return [{outcome for outcome, value in ratio.items() if value >= cut} for cut in cuts]
