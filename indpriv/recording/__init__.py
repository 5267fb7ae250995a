"""Recording, the run side: sees the model and the data, and writes a NormLog and an ExampleTable. Imports torch."""

from indpriv.recording.norms import per_example_gradient_norms
from indpriv.recording.recorder import Recorder
from indpriv.recording_policy import RecordingPolicy

__all__ = ["Recorder", "RecordingPolicy", "per_example_gradient_norms"]
