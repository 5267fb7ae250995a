"""Reconstruction of examples from gradients that someone reads. Sensitive. Imports torch."""

from indpriv.leakage.inversion import INVERSIONS, LBFGS, Adam, FirstLayer, Informed
from indpriv.leakage.leak import leak
from indpriv.leakage.observation import Observation

__all__ = ["INVERSIONS", "LBFGS", "Adam", "FirstLayer", "Informed", "Observation", "leak"]
