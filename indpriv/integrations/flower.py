"""Records the rounds of Flower's strategies with fixed clipping. Needs flwr; files are sensitive.

Flower averages updates by weights that clients send, and adds noise for equal ones: its standard
deviation on the average is noise_multiplier * clipping_norm / num_sampled_clients. One client moves
the average by at most its weight times clipping_norm. So what is recorded is the noise over the
largest weight of the round, which falls below Flower's noise_multiplier where weights differ or
clients drop out. Read from flwr 1.41.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _checks, _facts, _storage
from indpriv._types import ArrayLike, FloatArray
from indpriv.errors import InputError, check_installed
from indpriv.norm_log.run_files import checked_run_info
from indpriv.round_recorder import ROUNDING, RoundRecorder

# Of a `RoundRecorder`; what else it takes follows from the strategy. A unit within a client has no
# account here: one row of a client can move its clipped update by twice the clipping norm.
_SETTINGS = ("seeded", "resume_at", "upload_to", "bucket_is_private", "sign_with")


def recorded(
    strategy: Any,
    run_dir: str | Path,
    *,
    client_ids: ArrayLike | None = None,
    client_of: Callable[[Any], Any] | None = None,
    run_info: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A strategy that does what the given one does, and records each round before it is published.

    Start it in place of the given strategy. A round in which Flower skips the aggregation, as it
    does after an error of a client, changes no model and is not recorded.

    Args:
        strategy: a DifferentialPrivacyServerSideFixedClipping or ...ClientSideFixedClipping of
            `flwr.serverapp.strategy`, around a strategy that averages as FedAvg does.
        run_dir: as for `RoundRecorder`.
        client_ids: all clients that may take part; default the nodes that are connected when the
            first round begins, as texts. Then a client is a node: one that connects again under
            another id counts as another client.
        client_of: the client of a reply, one of client_ids, where it is not the node.
        run_info: what else to keep in run.json, e.g. {"delta": 1e-5}.
        settings: seeded, which Python's or numpy's random numbers with a known seed are; resume_at,
            upload_to, bucket_is_private and sign_with, as for `RoundRecorder`.

    Returns:
        a `flwr.serverapp.strategy.Strategy`.

    Raises:
        InputError: a strategy without a known average, with adaptive clipping or without noise; and
            while it runs, a reply that is not finite or has other arrays than the model, integers
            in the model, or an update that its client did not clip.
    """
    _check_strategy(strategy)
    if client_of is not None and (client_ids is None or not callable(client_of)):
        raise _facts.refused("refusal.flower", "client_of", client_of=client_of)
    _storage.bucket_to_write(settings.get("upload_to"), settings.get("bucket_is_private", False))
    if others := sorted(settings.keys() - _SETTINGS):
        raise _facts.refused("refusal.flower", "setting", name=others[0], known=_SETTINGS)
    about = {"participation": "known", **checked_run_info(run_info)}
    start = partial(
        RoundRecorder, _storage.location_on_disk(run_dir, "a run is"), run_info=about, **settings
    )
    rounds = _Rounds(
        strategy, start, client_ids, client_of or (lambda reply: str(reply.metadata.src_node_id))
    )

    class Recorded(type(strategy)):  # type: ignore[misc]
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            rounds.begin(arrays, list(grid.get_node_ids()), len(messages))
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            lengths = rounds.lengths(replies)  # Flower clips in place
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is not None:
                rounds.record(replies, lengths)
            return arrays, metrics

        def start(self, *settings: Any, **named: Any) -> Any:
            with rounds.files:
                return super().start(*settings, **named)

    found = Recorded.__new__(Recorded)  # the given strategy, whose state it shares
    found.__dict__ = vars(strategy)
    return found


def _check_strategy(strategy: Any) -> None:
    """InputError unless the sensitivity of what a strategy publishes is known."""
    check_installed("Records of Flower's rounds", "flower", "flwr")
    from flwr.serverapp import strategy as flower

    kind, inner = type(strategy), type(getattr(strategy, "strategy", None))
    sides = "DifferentialPrivacyServerSide{}Clipping", "DifferentialPrivacyClientSide{}Clipping"
    fixed, adaptive = (
        tuple(getattr(flower, side.format(how)) for side in sides) for how in ("Fixed", "Adaptive")
    )
    if kind not in fixed:
        name, is_adaptive = f"{kind.__module__}.{kind.__name__}", isinstance(strategy, adaptive)
        raise _facts.refused("refusal.flower", "adaptive" if is_adaptive else "strategy", name=name)
    if getattr(inner, "aggregate_train", None) is not flower.FedAvg.aggregate_train:
        raise _facts.refused("refusal.flower", "no_average", strategy=inner.__name__)
    for one in (strategy, strategy.strategy):
        if patched := [name for name in vars(one) if callable(getattr(type(one), name, None))]:
            said = {"name": patched[0], "strategy": type(one).__name__}
            raise _facts.refused("refusal.flower", "patched", **said)
    _checks.check_setting("max_grad_norm", strategy.clipping_norm)
    _checks.check_setting("noise_multiplier", strategy.noise_multiplier)


@dataclass
class _Rounds:
    """The log of one strategy."""

    strategy: Any
    start: Callable[..., RoundRecorder]  # (ids, sampler=): its recorder, when a first round begins
    client_ids: ArrayLike | None
    client_of: Callable[[Any], Any]
    files: ExitStack = field(default_factory=ExitStack)  # closes the log; around all rounds
    recorder: RoundRecorder | None = None

    def begin(self, model: Any, nodes: Sequence[int], n_chosen: int) -> None:
        """A round in which n_chosen of the connected nodes get the model."""
        from flwr.serverapp.strategy import FedAvg, FedProx

        _check_strategy(self.strategy)  # which may have been changed since
        self._model = {name: array.numpy() for name, array in model.items()}
        for name, array in self._model.items():
            if array.dtype.kind != "f":
                raise _facts.refused("refusal.flower", "integers", name=name, dtype=array.dtype)
            self._model[name] = array.astype(np.float64)
        if self.recorder is None:
            # Flower's own choice of nodes is a random set of one size.
            own = type(self.strategy.strategy).configure_train
            known = own in (FedAvg.configure_train, FedProx.configure_train)
            ids = [str(node) for node in nodes] if self.client_ids is None else self.client_ids
            recorder = self.start(ids, sampler="fixed_size" if known else "other")
            self.recorder = self.files.enter_context(recorder)
            self._n_clients = np.size(ids)
        # A client may be several nodes, or none that is connected now.
        self._rate = min(1.0, max(n_chosen, 1) / max(min(len(nodes), self._n_clients), 1))

    def lengths(self, replies: Sequence[Any]) -> FloatArray:
        """(n,) lengths of the updates in replies, of which errors count as 0."""
        return np.array([0.0 if reply.has_error() else self._length(reply) for reply in replies])

    def record(self, replies: Sequence[Any], before: FloatArray) -> None:
        """Append a round of replies as averaged, given lengths of updates before clipping."""
        strategy, recorder = self.strategy, self.recorder
        if recorder is None:
            raise InputError("aggregate_train came before configure_train; call `start`")
        limit, after = float(strategy.clipping_norm), self.lengths(replies)
        who = [self.client_of(reply) for reply in replies]
        if after.max() > limit * (1 + ROUNDING):
            client = who[int(after.argmax())]
            values = {"client": client, "length": after.max(), "limit": limit}
            raise _facts.refused("refusal.flower", "not_clipped", **values)
        key = strategy.strategy.weighted_by_key
        weights = np.array(
            [float(next(iter(reply.content.metric_records.values()))[key]) for reply in replies]
        )
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.max() > 0):
            few = weights.tolist()[:5]
            raise _facts.refused("refusal.flower", "weights", weights=few, key=key)
        share = weights / weights.max()
        largest = weights.max() / weights.sum() * max(1.0, after.max() / limit)
        recorder.round(
            who,
            np.where(share < 1, np.minimum(before, limit) * share, before),
            noise_multiplier=strategy.noise_multiplier / (strategy.num_sampled_clients * largest),
            max_grad_norm=strategy.clipping_norm,
            sample_rate=self._rate,
        )

    def _length(self, reply: Any) -> float:
        """Of the update of one client: its arrays less those of the model."""
        model, squares = self._model, 0.0
        form = [(name, array.shape, "f") for name, array in model.items()]
        for record in reply.content.array_records.values():
            sent = {name: array.numpy() for name, array in record.items()}
            if [(name, array.shape, array.dtype.kind) for name, array in sent.items()] != form:
                raise _facts.refused("refusal.flower", "arrays", client=self.client_of(reply))
            squares += sum(float(np.square(sent[name] - model[name]).sum()) for name in model)
        if not np.isfinite(squares):
            raise _facts.refused("refusal.flower", "not_finite", client=self.client_of(reply))
        return float(np.sqrt(squares))
