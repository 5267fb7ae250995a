"""Attacks on a trained model: from what is known about the model to AttackScores. Sensitive."""

from indpriv.attacks.language import extraction as extraction
from indpriv.attacks.language import known_texts as known_texts
from indpriv.attacks.registry import ATTACKS as ATTACKS
from indpriv.attacks.registry import Attack as Attack
from indpriv.attacks.registry import Material as Material
from indpriv.attacks.registry import language_scores as language_scores
from indpriv.attacks.released import LabelQueries as LabelQueries
from indpriv.attacks.released import boundary_scores as boundary_scores
from indpriv.attacks.train_references import train_references as train_references
