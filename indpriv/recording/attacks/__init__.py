"""Attacks on a run while it trains: a Recorder's argument `attack=`. Sensitive."""

from indpriv.recording.attacks.gradient_canaries import GradientCanaries
from indpriv.recording.attacks.mislabelled_canaries import MislabelledCanaries
from indpriv.recording.attacks.white_box import WhiteBox

__all__ = ["GradientCanaries", "MislabelledCanaries", "WhiteBox"]
