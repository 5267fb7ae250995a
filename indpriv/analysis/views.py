"""Who sees what of a federated run, and what that may tell of a client or of a row. Sensitive.

An outsider sees every model that the server publishes. The server sees the update of each client,
and so does whoever reads it on its way. Some may read the gradient of a single row in training.
Noise protects only from those who read what has it. All but outsiders know who took part.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from indpriv._files import first_at
from indpriv._types import FloatArray, IntArray
from indpriv.accountant.known import known_units
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.accountant.method import Method
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog, noisier

View: Any = record("view")
OBSERVERS = ("outsider", "update", "gradient")
CLIENT, ROW = "client", "row"


def views_of(run: AuditedRun) -> tuple[View, ...]:
    """The views of a federated run of clients or of rows; empty for other runs and other units.

    The table [federated] of run.json says where noise is added. Without one, the server adds it to
    the sum of updates, or each client to its batches of rows.
    """
    log, account, recorded = run.log, run.epsilons.account, run.recorded
    several = (account.rows_per_unit or 1) > 1  # rows of people from another column
    if not recorded.recorder.get("rounds") or several or log.unit not in ("client", "example"):
        return ()
    settings = first_at(recorded.declared.content, ("config", "federated")) or {}
    place, pruned = settings.get("noise_at"), settings.get("share", 1.0) < 1
    if log.unit == "client":
        found = _of_clients(log, run.epsilons.table(), place or "server", pruned)
        if settings.get("copies", 1) > 1:
            why = "copies of it are in several clients"
            found = tuple(_nothing(ROW, o.observer, why) if o.unit == ROW else o for o in found)
        return found
    outside = settings.get("local_steps") == 1 and not pruned
    return _of_rows(log, account.delta, place or "batch", outside)


def _of_clients(log: NormLog, table: EpsilonTable, place: str, pruned: bool) -> tuple[View, ...]:
    """Updates of clients are clipped; rows are protected as parts of them."""
    account, least = table.account, float(log.settings.noise_multiplier.min())
    worst, middle = table.worst_case_epsilon, float(np.median(table.epsilon))
    outsider, update, gradient = OBSERVERS
    outside = View(CLIENT, outsider, least, account.participation, worst, middle, "")
    found = {outsider: (outside, _replaced_row(log, account.delta, outsider))}
    bare = {gradient: "gradients have no noise"}
    if place == "server":
        bare[update] = "the server adds noise after it has read the updates"
    else:  # the log has the noise of all who came, of whom each added the same
        came = np.ones(log.total_steps) if pruned else _batches(log, np.arange(log.n_examples))[0]
        own = noisier(log, 1 / np.sqrt(came))
        known = _known(own, account.delta, CLIENT, update)
        found[update] = known, _replaced_row(own, account.delta, update)
    for observer, why in bare.items():
        found[observer] = _nothing(CLIENT, observer, why), _nothing(ROW, observer, why)
    return tuple(found[observer][unit] for unit in (0, 1) for observer in OBSERVERS)


def _of_rows(log: NormLog, delta: float, place: str, adds_up: bool) -> tuple[View, ...]:
    """Gradients of rows are clipped; a client is protected as far as its rows add up.

    adds_up: a round is one local step, so that the noise of all who came is in the model.
    """
    if log.unit_ids is None:
        return ()
    _, owners = np.unique(log.unit_ids, return_inverse=True)
    clients, smallest, largest = _batches(log, owners)
    alike = adds_up and np.array_equal(smallest, largest)
    outside = noisier(log, np.sqrt(clients)) if alike else log
    found = [
        _known(replace(seen, unit=unit), delta, name, observer)
        for name, unit in ((CLIENT, "client"), (ROW, "example"))
        for seen, observer in ((outside, OBSERVERS[0]), (log, OBSERVERS[1]))
    ]
    last = _nothing(ROW, OBSERVERS[2], "noise is added to the sum of a batch, not to its gradients")
    if place == "row":  # the log has the noise of a batch
        last = _known(noisier(log, 1 / np.sqrt(largest)), delta, ROW, OBSERVERS[2])
    return (*found, last)


def _known(log: NormLog, delta: float, unit: str, observer: str) -> View:
    """A view against those who know who took part."""
    known = known_units(log, Method(delta=delta, participation="known"))
    each = gaussian_epsilons(np.sqrt(known["own"]), delta)[1]
    worst = gaussian_epsilons(np.sqrt([known["clipped"].max()]), delta)[1]
    least = float(log.settings.noise_multiplier.min())
    return View(unit, observer, least, "known", float(worst[0]), float(np.median(each)), "")


def _replaced_row(log: NormLog, delta: float, observer: str) -> View:
    """A row whose client sends another update: their distance is at most 2 max_grad_norm."""
    whole = _known(noisier(log, 0.5), delta, ROW, observer)
    return replace(whole, median_epsilon=None, reason="its client is replaced")


def _nothing(unit: str, observer: str, reason: str) -> View:
    return View(unit, observer, None, "known", None, None, reason)


def _batches(log: NormLog, owners: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(total_steps,) numbers of clients, and of rows in their smallest and largest batch; from 1.

    owners: (n_examples,) the number of each row's client.
    """
    clients, smallest, largest = np.ones((3, log.total_steps))
    if log.batch_norms is None:
        return clients, smallest, largest
    entries = log.batch_norms.read(0, log.n_examples)
    keys = entries.step.astype(np.int64) * (int(owners.max()) + 1) + owners[entries.position]
    found, sizes = np.unique(keys, return_counts=True)
    steps = found // (int(owners.max()) + 1)
    came, first = np.unique(steps, return_index=True)
    if len(came):
        clients[came] = np.bincount(steps, minlength=log.total_steps)[came]
        smallest[came] = np.minimum.reduceat(sizes, first)
        largest[came] = np.maximum.reduceat(sizes, first)
    return clients, smallest, largest


FINDING = Finding("views", lambda run: {"views": views_of(run)})
