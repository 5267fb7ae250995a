"""Attacks on a trained model: from what is known about the model to AttackScores. Sensitive."""

from indpriv.attacks.boundary import boundary_scores
from indpriv.attacks.language import extraction, language_scores
from indpriv.attacks.registry import ATTACKS, Attack, Material
from indpriv.attacks.train_references import train_references

__all__ = [
    "ATTACKS",
    "Attack",
    "Material",
    "boundary_scores",
    "extraction",
    "language_scores",
    "train_references",
]
