"""What the paper prints: Wei, Liu, Wu, Su, Iyengar, "Gradient-Leakage Resilient Federated Learning", ICDCS 2021. The one place for its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = "IEEE International Conference on Distributed Computing Systems (ICDCS), 2021"
NOISE, CLIP, DELTA = 6.0, 4.0, 1e-5
STATED_RATE = 0.01  # "the global sampling rate" of a row, whatever the clients
CLIENT_RATE = 0.1
LAYERS = 3  # of the paper's network, without biases; each is clipped at C
LOCAL_RATE = 0.05  # learning rate of the published code


@dataclass(frozen=True)
class Setting:
    """Rounds T, local steps L and local batch size B of a data set."""

    rounds: int
    local_steps: int
    batch: int


SETTINGS: Mapping[str, Setting] = {
    "MNIST": Setting(100, 100, 5),
    "LFW": Setting(60, 100, 3),
    "Adult": Setting(10, 100, 3),
    "cancer": Setting(3, 100, 4),
}
# Fed-CDP with one local step, Fed-CDP with 100, Fed-SDP; CIFAR-10 as MNIST
TABLE_6: Mapping[str, tuple[float, float, float]] = {
    "MNIST": (0.0845, 0.8227, 0.8536),
    "LFW": (0.0689, 0.6356, 0.6677),
    "Adult": (0.0494, 0.2761, 0.3025),
    "cancer": (0.0467, 0.1469, 0.2065),
}
# MNIST by system, 100 clients, 10 in a round; 10,000 clients, 5,000 in a round
TABLE_2 = {
    "no DP": (0.954, 0.979),
    "Fed-SDP": (0.823, 0.944),
    "Fed-CDP": (0.831, 0.966),
    "Fed-CDP(decay)": (0.842, 0.980),
}
BY_SHARE = {  # MNIST, 100 clients, of which 5, 10, 20 and 50 % take part in a round
    "no DP": (0.924, 0.954, 0.959, 0.965),
    "Fed-SDP": (0.803, 0.823, 0.834, 0.872),
    "Fed-CDP": (0.815, 0.831, 0.858, 0.903),
    "Fed-CDP(decay)": (0.833, 0.842, 0.866, 0.909),
}
TABLE_1 = {"Adult": 0.8424, "cancer": 0.993, "LFW": 0.695}  # accuracy without DP
# Accuracy of Fed-CDP by clipping norm (sigma = 6) and by noise multiplier (C = 4), at `VALUES`
VALUES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
TABLE_4 = {
    "MNIST": (0.914, 0.934, 0.943, 0.949, 0.933, 0.923),
    "Adult": (0.81, 0.822, 0.825, 0.824, 0.807, 0.796),
    "cancer": (0.965, 0.972, 0.979, 0.979, 0.972, 0.972),
    "LFW": (0.582, 0.594, 0.619, 0.649, 0.627, 0.601),
}
TABLE_5 = {
    "MNIST": (0.956, 0.954, 0.952, 0.951, 0.949, 0.934),
    "Adult": (0.838, 0.837, 0.836, 0.834, 0.824, 0.822),
    "cancer": (0.993, 0.993, 0.993, 0.993, 0.979, 0.979),
    "LFW": (0.683, 0.678, 0.672, 0.667, 0.649, 0.646),
}
TABLE_3 = {"no DP": 6.8, "Fed-SDP": 6.9, "Fed-CDP": 22.4, "Fed-CDP(decay)": 22.6}  # ms, MNIST
# Mean squared error of reconstructions: no DP, Fed-SDP, Fed-CDP, Fed-CDP(decay)
TABLE_7 = {
    "MNIST, types 0 and 1": (0.1549, 0.6991, 0.7695, 0.937),
    "MNIST, type 2": (0.0008, 0.0008, 0.739, 0.943),
    "LFW, types 0 and 1": (0.2214, 0.7352, 0.8036, 0.941),
    "LFW, type 2": (0.0014, 0.0014, 0.6626, 0.945),
}
# Orders of TensorFlow Privacy's moments accountant, by which Table VI was computed
ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)
