"""Our numbers beside the printed cells: (row, place of the column) -> number, from a page's committed figures."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from reports.fedcdp.page import accuracies, swept
from reports.fedcdp.training import SWEPT

Cells = dict[tuple[str, int], float]
_SYSTEMS = {
    "baseline": "DP-baseline",
    "cdecay": "dynS[Cdecay]",
    "l2max": "dynS[l2-max], not private",
    "dyns": "dynS, not private",
    "quantile": "quantile clipping",
    "adaclip": "AdaClip",
    "moving_exponential": "dyn[S,sigma], not private",
}
_NAMES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "lfw_people": "LFW",
}
_FEDERATED = ("no DP", "Fed-SDP", "Fed-CDP", "Fed-CDP(decay)")


def ours(name: str, item: str, known: Mapping[str, Any]) -> Cells:
    """What we have of a table of a paper; empty where nothing was run."""
    made = {
        ("wei2021", "III"): _pictures,
        ("wei2021", "IV"): _by_norm,
        ("wei2021", "V"): _accountants,
        ("wei2021", "VIII"): _iterations,
        ("wei2021", "X"): _steps,
        ("wei2021", "XI"): _beside_adaptive,
        ("fedcdp", "II"): _clients,
        ("fedcdp", "III"): _local_steps,
        ("fedcdp", "I"): _without_dp,
        ("fedcdp", "IV"): lambda known: _swept(known, "clip"),
        ("fedcdp", "V"): lambda known: _swept(known, "noise"),
        ("fedcdp", "VI"): _federated_epsilons,
        ("fedcdp", "VII"): _leakage,
    }.get((name, item))
    return made(known) if made else {}


def _pictures(known: Mapping[str, Any]) -> Cells:
    titles = {
        "none": "without privacy",
        "baseline": "DP-baseline",
        "quantile": "quantile clipping",
        "adaclip": "AdaClip",
        "dyn[S,sigma]": "dyn[S,sigma]",
    }
    return {
        (f"{_NAMES[row['data']]}, {titles[row['protection']]}", place): row[key]
        for row in known["leakage"]
        if row["protection"] in titles and row["attack"] == "as published"
        for place, key in enumerate(("iterations", "success", "error"))
        if row[key] is not None
    }


def _mean_accuracy(known: Mapping[str, Any], system: str, norm: int) -> float | None:
    runs = [
        run["test_accuracy"][-1]
        for name, run in known["runs"].items()
        if name.startswith(f"{system}-{norm}-")
    ]
    return mean(runs) if runs else None


def _by_norm(known: Mapping[str, Any]) -> Cells:
    return {
        (f"MNIST, {title}", place): found
        for system, title in _SYSTEMS.items()
        if system in ("baseline", "cdecay", "l2max", "dyns")
        for place, norm in enumerate((1, 2, 4, 8, 16, 32))
        if (found := _mean_accuracy(known, system, norm)) is not None
    }


def _beside_adaptive(known: Mapping[str, Any]) -> Cells:
    return {
        (title, 0): found
        for system, title in _SYSTEMS.items()
        if system in ("baseline", "quantile", "adaclip", "moving_exponential")
        and (found := _mean_accuracy(known, system, 4)) is not None
    }


def _accountants(known: Mapping[str, Any]) -> Cells:
    rows = {
        "10000": "MNIST, Fashion-MNIST, CIFAR-10: 10,000 steps",
        "6000": "LFW: 6,000 steps",
        "5000": "Purchase-10, Purchase-50: 5,000 steps",
    }
    found = known["accounts"]["table_5"]
    return {(rows[steps], i): value for steps in rows for i, value in enumerate(found[steps])}


def _iterations(known: Mapping[str, Any]) -> Cells:
    found = known["accounts"]["table_8"]
    return {(f"{law}, iterations", i): n for law, each in found.items() for i, n in enumerate(each)}


def _steps(known: Mapping[str, Any]) -> Cells:
    titles = {
        "none": "without privacy",
        "baseline": "DP-baseline",
        "moving": "dyn[S,sigma], not private",
        "quantile": "quantile clipping (Table XI)",
        "adaclip": "AdaClip (Table XI)",
    }
    cost = known["cost"]
    return {(title, 0): cost[key] / cost["baseline"] for key, title in titles.items()}


def _clients(known: Mapping[str, Any]) -> Cells:
    """100 clients, the network with convolutions as the paper's, by share of a round."""
    names = dict(zip(_FEDERATED, ("no_dp_cnn", "sdp_cnn", "cdp_cnn", "cdp_decay_cnn"), strict=True))
    runs = known["runs"]
    return {
        (title, place): runs[name + suffix]["test_accuracy"][-1]
        for title, name in names.items()
        for place, suffix in enumerate(("_0.05", "", "_0.2", "_0.5"))
        if name + suffix in runs
    }


def _local_steps(known: Mapping[str, Any]) -> Cells:
    cost = known["cost"]
    return {(title, 0): cost[title] / cost["no DP"] for title in _FEDERATED}


def _without_dp(known: Mapping[str, Any]) -> Cells:
    names = {2: "lfw_people_no_dp", 3: "adult_no_dp", 4: "breast_cancer_no_dp"}
    found = {place: accuracies(known["runs"], name) for place, name in names.items()}
    return {("accuracy", place): mean(each) for place, each in found.items() if each}


def _swept(known: Mapping[str, Any], key: str) -> Cells:
    return {
        ({"Adult": "adult"}.get(data, data), place): mean(found)
        for data in SWEPT
        for place, found in enumerate(swept(known["runs"], data, key))
        if found
    }


def _federated_epsilons(known: Mapping[str, Any]) -> Cells:
    places = {"MNIST": (0, 1), "LFW": (2,), "Adult": (3,), "cancer": (4,)}
    titles = ("Fed-CDP, L = 1", "Fed-CDP, L = 100", "Fed-SDP, L = 1 and 100")
    return {
        (title, place): value
        for data, columns in places.items()
        for title, value in zip(titles, known["accounts"]["table_6"][data], strict=True)
        for place in columns
    }


def _leakage(known: Mapping[str, Any]) -> Cells:
    systems = {
        "no DP": ("no DP",),
        "Fed-SDP, noise of the client": ("Fed-SDP",),
        "Fed-CDP": ("Fed-CDP",),
        "Fed-CDP(decay)": ("Fed-CDP(decay)",),
        "no DP, Fed-SDP": ("no DP", "Fed-SDP"),
        "Fed-CDP, noise on each row": ("Fed-CDP",),
        "Fed-CDP(decay), noise on each row": ("Fed-CDP(decay)",),
    }
    return {
        (f"{_NAMES[row['data']]}, {row['type']}, {title}", place): row[key]
        for row in known["leakage"]
        if row["attack"] == "as published"
        for title in systems.get(row["system"], ())
        for place, key in enumerate(("error", "iterations"))
    }
