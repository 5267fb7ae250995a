"""Recording, the run side: sees the model and the data, and writes a NormLog and an ExampleTable. Imports torch."""

from indpriv.recording.audit_spec import AuditSpec
from indpriv.recording.norms import per_example_gradient_norms
from indpriv.recording.recorder import Recorder
from indpriv.recording.replay import replay
from indpriv.recording.step_settings import StepOptions
from indpriv.recording_policy import RecordingPolicy

__all__ = ["AuditSpec", "Recorder", "RecordingPolicy", "StepOptions", "per_example_gradient_norms", "replay"]
