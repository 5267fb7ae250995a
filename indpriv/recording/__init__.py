"""Recording: sees model and data, writes a NormLog and an ExampleTable. Imports torch."""

# ruff: noqa: E402  what is missing is told before the first import that needs it
import re
from importlib.metadata import version

from indpriv.errors import InputError, check_installed

check_installed("Recorder and replay", "opacus", "torch", "opacus", "safetensors")
if [*map(int, re.findall(r"\d+", version("opacus"))[:3])] < [1, 5, 4]:
    raise InputError(f"Opacus {version('opacus')} is too old: pip install 'opacus>=1.5.4,<1.7'")

from indpriv.norm_log.fields import RecordingPolicy
from indpriv.recording.attacks import (
    GradientCanaries,
    InsertedCanaries,
    MislabelledCanaries,
    WhiteBox,
)
from indpriv.recording.checkpoints.replay import AuditSpec, replay
from indpriv.recording.checkpoints.saved_models import StepOptions
from indpriv.recording.clipping import AdaClip, QuantileClipping
from indpriv.recording.dp_trainers import attach_dptrainer, with_position_ids
from indpriv.recording.norms.batches import CausalLMLoss
from indpriv.recording.norms.norm_pass import NormPass, per_example_gradient_norms
from indpriv.recording.opacus.draws import TruncatedPoissonSampler
from indpriv.recording.random_states import private_generator
from indpriv.recording.recorder import Recorder
from indpriv.recording.references import references_for_run
from indpriv.recording.released import crafted_canaries, released_model

__all__ = [
    "AdaClip",
    "AuditSpec",
    "CausalLMLoss",
    "GradientCanaries",
    "InsertedCanaries",
    "MislabelledCanaries",
    "NormPass",
    "QuantileClipping",
    "Recorder",
    "RecordingPolicy",
    "StepOptions",
    "TruncatedPoissonSampler",
    "WhiteBox",
    "attach_dptrainer",
    "crafted_canaries",
    "per_example_gradient_norms",
    "private_generator",
    "references_for_run",
    "released_model",
    "replay",
    "with_position_ids",
]
