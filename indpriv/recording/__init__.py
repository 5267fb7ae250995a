"""Recording: sees model and data, writes a NormLog and an ExampleTable. Imports torch."""

# ruff: noqa: E402  what is missing is told before the first import that needs it
import re
from importlib.metadata import version

from indpriv.errors import InputError, check_installed

check_installed("Recorder and replay", "opacus", "torch", "opacus", "safetensors")
if [*map(int, re.findall(r"\d+", version("opacus"))[:3])] < [1, 5, 4]:
    raise InputError(f"Opacus {version('opacus')} is too old: pip install 'opacus>=1.5.4,<1.7'")

from indpriv.norm_log.fields import RecordingPolicy as RecordingPolicy
from indpriv.recording.attacks import GradientCanaries as GradientCanaries
from indpriv.recording.attacks import InsertedCanaries as InsertedCanaries
from indpriv.recording.attacks import MislabelledCanaries as MislabelledCanaries
from indpriv.recording.attacks import WhiteBox as WhiteBox
from indpriv.recording.checkpoints.replay import AuditSpec as AuditSpec
from indpriv.recording.checkpoints.replay import replay as replay
from indpriv.recording.checkpoints.saved_models import StepOptions as StepOptions
from indpriv.recording.clipping import AdaClip as AdaClip
from indpriv.recording.clipping import QuantileClipping as QuantileClipping
from indpriv.recording.dp_trainers import attach_dptrainer as attach_dptrainer
from indpriv.recording.dp_trainers import with_position_ids as with_position_ids
from indpriv.recording.norms.batches import CausalLMLoss as CausalLMLoss
from indpriv.recording.norms.norm_pass import NormPass as NormPass
from indpriv.recording.norms.norm_pass import (
    per_example_gradient_norms as per_example_gradient_norms,
)
from indpriv.recording.opacus.draws import TruncatedPoissonSampler as TruncatedPoissonSampler
from indpriv.recording.random_states import private_generator as private_generator
from indpriv.recording.recorder import Recorder as Recorder
from indpriv.recording.references import crafted_canaries as crafted_canaries
from indpriv.recording.references import references_for_run as references_for_run
from indpriv.recording.references import released_model as released_model
