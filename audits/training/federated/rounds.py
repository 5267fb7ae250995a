"""Rounds of a federated run: who takes part, local training, clipping, noise. Sensitive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from audits.training.config import FederatedConfig
from audits.training.datasets.base import Split
from audits.training.federated.local import Clipping, LocalTraining, RowProtection
from audits.training.randomness import Randomness, generator
from indpriv._types import FloatArray, IntArray
from indpriv.norm_log.fields import StepSetting
from indpriv.round_recorder import RoundRecorder

_SLACK = 1e-6  # clipped vectors are rounded to float32


@dataclass(frozen=True)
class Clients:
    """The clients: names (n_clients,), the rows of each, and the original (n_rows,) of each row.

    Rows that are copies of each other have the same original, numbered from 0.
    """

    names: NDArray[np.generic]
    rows: list[IntArray]
    originals: IntArray
    left_over: int = 0  # rows of no client

    def __len__(self) -> int:
        return len(self.names)


class Federation:
    """A model on a server, and clients that send it updates.

    The sum of updates is divided by the planned number of clients, whoever comes.
    """

    def __init__(
        self,
        settings: FederatedConfig,
        clipping: str,
        clients: Clients,
        module: nn.Module,
        train: Split,
        randomness: Randomness,
    ) -> None:
        """Begin with the parameters of a module; clipping: "flat" or "per_layer"."""
        device = next(module.parameters()).device
        inputs, targets = (torch.from_numpy(rows) for rows in (train.inputs, train.targets))
        self._settings, self._clients = settings, clients
        self._planned = settings.planned(len(clients))
        self._local = LocalTraining(
            module, inputs.to(device), targets.to(device), settings.local_learning_rate
        )
        self.read_parameters(module)
        self._clipping = Clipping(self._local.sizes, clipping == "per_layer")
        self._coins = generator(randomness.sampling)
        self._noise = generator(randomness.noise, device)
        self._order = np.random.default_rng(randomness.shuffling)
        by_row = settings.protect == "row"
        n_units = int(clients.originals.max()) + 1 if by_row else len(clients)
        self.squared_mu: FloatArray = np.zeros(n_units)  # of each protected unit

    @property
    def largest_mu(self) -> float:
        """Of the unit that took part most, at max_grad_norm, as if all knew who took part."""
        return math.sqrt(self.squared_mu.max())

    def read_parameters(self, module: nn.Module) -> None:
        """Take the parameters of a module for those of the server."""
        self.parameters = parameters_to_vector(module.parameters()).detach().clone()

    def write_parameters(self, module: nn.Module) -> None:
        """Put the parameters of the server into a module."""
        vector_to_parameters(self.parameters.clone(), module.parameters())

    def round(self, setting: StepSetting, recorder: RoundRecorder | None) -> None:
        """One round: it is recorded before the parameters of the server change."""
        chosen = self._drawn()
        rows = [self._local_batches(self._clients.rows[client]) for client in chosen]
        protect, place = self._settings.protect, self._settings.noise_place
        total = torch.zeros_like(self.parameters)
        if protect == "row":
            noise = setting.noise_multiplier * setting.max_grad_norm
            protection = RowProtection(
                self._clipping, setting.max_grad_norm, noise, place == "row", self._noise
            )
            norms: list[Tensor] = []
            if len(chosen):
                updates, norms = self._local.updates(self.parameters, rows, protection)
                total = self._shared(updates).sum(dim=0)
            self._record_rows(setting, recorder, rows, norms)
        else:
            lengths = np.zeros(0)
            if len(chosen):
                updates, _ = self._local.updates(self.parameters, rows)
                if protect == "client":
                    updates, found = self._clipping.clip(updates, setting.max_grad_norm)
                    lengths = found.cpu().numpy() * (1 + _SLACK)
                total = self._shared(self._with_noise(updates, setting)).sum(dim=0)
            if place == "server":
                total = total + self._drawn_noise(total, setting, 1.0)
            if protect == "client":
                self._record_clients(setting, recorder, chosen, lengths)
        rate = self._settings.server_learning_rate / self._planned
        self.parameters = self.parameters + rate * total

    def _drawn(self) -> IntArray:
        """Clients of a round, by coins or as a set of fixed size."""
        n = len(self._clients)
        if self._settings.sampler == "fixed_size":
            found = torch.randperm(n, generator=self._coins)[: int(self._planned)]
        else:
            coins = torch.rand(n, generator=self._coins, dtype=torch.float64)
            found = torch.nonzero(coins < self._settings.client_rate)[:, 0]
        return np.sort(found.numpy())

    def _local_batches(self, rows: IntArray) -> list[IntArray]:
        """Rows of each local step of a client; none twice."""
        steps, size = self._settings.local_steps, self._settings.local_batch_size
        if size is None:
            return [rows]
        drawn = self._order.permutation(rows)[: steps * size]
        return list(drawn.reshape(steps, size))

    def _with_noise(self, updates: Tensor, setting: StepSetting) -> Tensor:
        """Updates with the noise that clients add to their own."""
        place = self._settings.noise_place
        if place not in ("clients", "clients_shared"):
            return updates
        share = 1.0 if place == "clients" else 1 / math.sqrt(self._planned)
        return updates + self._drawn_noise(updates, setting, share)

    def _drawn_noise(self, like: Tensor, setting: StepSetting, share: float) -> Tensor:
        std = setting.noise_multiplier * setting.max_grad_norm * share
        return std * torch.randn(like.shape, generator=self._noise, device=like.device)

    def _shared(self, updates: Tensor) -> Tensor:
        """The largest coordinates of each update (n_clients, d); the others are not sent."""
        share = self._settings.share
        if share == 1:
            return updates
        kept = max(1, round(share * updates.shape[1]))
        index = updates.abs().topk(kept, dim=1).indices
        return torch.zeros_like(updates).scatter(1, index, updates.gather(1, index))

    def _multiplier_of_clients(self, planned: float, n_chosen: int) -> float:
        """The noise multiplier of what is known outside, from what was realised.

        Where clients add noise themselves, that of all who came adds up; but pruning leaves out
        coordinates of the others, and then only a client's own noise counts.
        """
        place, pruned = self._settings.noise_place, self._settings.share < 1
        if place == "server":
            return planned
        came = 1.0 if pruned else float(max(n_chosen, 1))
        return planned * math.sqrt(came / (1.0 if place == "clients" else self._planned))

    def _record_clients(
        self,
        setting: StepSetting,
        recorder: RoundRecorder | None,
        chosen: IntArray,
        lengths: FloatArray,
    ) -> None:
        noise = self._multiplier_of_clients(setting.noise_multiplier, len(chosen))
        self.squared_mu[chosen] += 1 / noise**2
        if recorder is not None:
            recorder.round(
                self._clients.names[chosen],
                lengths,
                noise_multiplier=noise,
                max_grad_norm=setting.max_grad_norm,
                sample_rate=self._settings.client_rate,
            )

    def _record_rows(
        self,
        setting: StepSetting,
        recorder: RoundRecorder | None,
        rows: list[list[IntArray]],
        norms: list[Tensor],
    ) -> None:
        """One step of the log for each local step; its noise is that of one client alone."""
        steps = [np.concatenate(step) for step in zip(*rows, strict=True)]
        lengths = [
            np.concatenate(
                [each[: len(held)] for each, held in zip(step.cpu().numpy(), rows_, strict=True)]
            )
            * (1 + _SLACK)
            for step, rows_ in zip(norms, zip(*rows, strict=True), strict=True)
        ]
        noise = setting.noise_multiplier
        if self._settings.noise_place == "row":
            noise *= math.sqrt(min((len(step) for client in rows for step in client), default=1))
        for step in steps:  # copies in one step add up
            originals, copies = np.unique(self._clients.originals[step], return_counts=True)
            self.squared_mu[originals] += (copies / noise) ** 2
        if recorder is not None:
            recorder.steps(
                steps or [np.zeros(0, np.int64)] * self._settings.local_steps,
                lengths or [np.zeros(0)] * self._settings.local_steps,
                noise_multiplier=noise,
                max_grad_norm=setting.max_grad_norm,
                sample_rate=self._settings.client_rate,
            )
