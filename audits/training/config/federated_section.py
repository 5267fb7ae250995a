"""[federated] of an audit file."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from audits.training.config.values import KNOWN_KEYS_ONLY, Count, Name, Positive, PositiveShare
from indpriv.errors import InputError

NoisePlace = Literal["server", "clients", "clients_shared", "batch", "row"]
PLACES = {  # what is protected -> where noise may be added; the first is the default
    "client": ("server", "clients", "clients_shared"),
    "row": ("batch", "row"),
    "nobody": (),
}


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class FederatedConfig:
    """[federated]: rounds of clients that train on their own rows and send updates.

    It stands in place of epochs, batch_size and learning_rate in [training]; schedules there are
    laws of the round.

    Attributes:
        rounds: number of rounds.
        protect: "client": each update is clipped (Fed-SDP). "row": the gradient of each row is
            clipped in every local step (Fed-CDP). "nobody": no clipping and no noise.
        client_rate: chance of a client to take part in a round; the sum of updates is divided by
            this share of all clients, whoever comes.
        clients: number of clients; leave it out if `partition` names a column.
        sampler: "poisson" (independent coins) or "fixed_size".
        partition: "shards": rows sorted by label are cut into pieces of equal length, and each
            client gets `shards` of them; "equal": a random partition; or a metadata column whose
            values are the clients. Rows left over are not trained on; their number is told.
        shards: pieces of each client, so about as many labels as it has at most.
        local_steps: steps of SGD of a client in a round.
        local_batch_size: rows of each; left out for all rows of the client. No row is used twice
            in a round.
        local_learning_rate: of these steps.
        server_learning_rate: factor of the averaged update.
        noise_at: who adds noise. For clients "server", "clients" (each its own) or
            "clients_shared" (the planned number of them together as much as a server); for rows
            "batch" (once a local step) or "row" (on each gradient).
        share: share of its coordinates that a client sends, the largest first, chosen after the
            noise (pruning, DSSGD).
        copies: how often each row stands in the data that clients get, as in the published code
            of Wei et al. 2021. With more than one, the unit of protected rows is the original row.
    """

    rounds: Count
    protect: Literal["client", "row", "nobody"]
    client_rate: PositiveShare
    local_learning_rate: Positive
    clients: Count | None = None
    sampler: Literal["poisson", "fixed_size"] = "poisson"
    partition: Name = "equal"
    shards: Count = 2
    local_steps: Count = 1
    local_batch_size: Count | None = None
    server_learning_rate: Positive = 1.0
    noise_at: NoisePlace | None = None
    share: PositiveShare = 1.0
    copies: Count = 1

    def __post_init__(self) -> None:
        by_column = self.partition not in ("shards", "equal")
        if by_column == (self.clients is not None):
            raise InputError(
                f"partition = {self.partition!r} takes its clients from that column; leave out "
                "clients"
                if by_column
                else f"partition = {self.partition!r} needs clients, their number"
            )
        places = PLACES[self.protect]
        if self.noise_at is not None and self.noise_at not in places:
            raise InputError(
                f'protect = "{self.protect}" does not go with noise_at = "{self.noise_at}"; '
                + (f"choose among {', '.join(places)}" if places else "leave it out")
            )
        if self.share < 1 and self.noise_place == "server":
            raise InputError(
                f"share = {self.share:g} before the noise of the server would send coordinates "
                'chosen by data; set noise_at = "clients", or leave it out'
            )
        if self.clients is not None:
            self.planned(self.clients)

    @property
    def noise_place(self) -> str:
        """Who adds noise; "" if nobody does."""
        return self.noise_at or next(iter(PLACES[self.protect]), "")

    def planned(self, n_clients: int) -> float:
        """Number of clients of a round that the sum of updates is divided by.

        Raises:
            InputError: a fixed number that is not whole.
        """
        planned = self.client_rate * n_clients
        if self.sampler == "poisson":
            return planned
        if abs(planned - round(planned)) > 1e-9 or round(planned) < 1:
            raise InputError(
                f'sampler = "fixed_size" needs a whole number of clients in a round, not '
                f"{planned:g} (client_rate = {self.client_rate:g} of {n_clients})"
            )
        return round(planned)
