"""Which candidates an example is told from, and how often chance names it. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from indpriv.errors import InputError


@dataclass(frozen=True)
class Candidates:
    """What an attacker chooses from.

    Attributes:
        inputs: (m, ...) of the candidates.
        targets: (m,) their labels.
        own_inputs: (n, ...) of the examples, which were drawn as the candidates were.
        own_targets: (n,) their labels.
        labels_known: an example is told from candidates of its label.
        known_with: number of consecutive examples of which the attacker knows all but one.
    """

    inputs: Tensor
    targets: Tensor
    own_inputs: Tensor
    own_targets: Tensor
    labels_known: bool
    known_with: int

    def others(self, place: int) -> Tensor:
        """(m,) bool, the candidates that an example is told from: not its copies.

        Raises:
            InputError: there is none.
        """
        numbers, own = self._numbers
        others = self._left(place) & (numbers != own[place])
        if not others.any():
            raise InputError(
                "an example is told from no other candidate"
                + " of its label" * self.labels_known
                + "; pass more candidates, two at least"
            )
        return others

    def chance(self, place: int, n_guesses: int) -> float:
        """The most that the example is named by this number of guesses, which do not see it."""
        numbers, own = self._numbers
        left = self._left(place)
        number = int(left.sum()) + int(own[place] not in numbers[left])
        copies = int(numbers[self._labelled(place)].bincount().max())
        return min(1.0, n_guesses * copies / number)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Of candidates (m,) and of examples (n,): copies have the same number."""
        every = torch.cat([self.inputs, self.own_inputs]).flatten(1)
        found = torch.unique(every, dim=0, return_inverse=True)[1]
        return found[: len(self.inputs)], found[len(self.inputs) :]

    def _labelled(self, place: int) -> Tensor:
        """(m,) bool, the candidates with the label of an example, if the attacker knows it."""
        if self.labels_known:
            return self.targets == self.own_targets[place]
        return torch.ones(len(self.inputs), dtype=torch.bool)

    def _left(self, place: int) -> Tensor:
        """The same without the examples that the attacker knows; their copies may still be it."""
        (numbers, own), left = self._numbers, self._labelled(place)
        start = place - place % self.known_with
        for other in range(start, start + self.known_with):
            same = (left & (numbers == own[other])).nonzero()
            if other != place and len(same):
                left[same[0]] = False
        return left
