"""reports/fedcdp/README.md, from fedcdp.json beside it and what the paper prints. No figure is typed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

from indpriv._formatting import format_epsilon
from reports.fedcdp import paper
from reports.fedcdp.cost import RULE as COST_RULE
from reports.fedcdp.cost import cost_section, verdict_of_cost
from reports.fedcdp.leakage import CLAIMS as LEAKAGE_CLAIMS
from reports.fedcdp.leakage import RULE as LEAKAGE_RULE
from reports.fedcdp.leakage import leakage_section, verdicts_of_leakage
from reports.fedcdp.proposition import MULTIPLES
from reports.fedcdp.training import (
    COPIES,
    DECAY,
    MEDIAN_EPSILON,
    MEDIANS,
    PRUNED,
    REPEATS,
    RUNS,
    SHARES,
    SWEPT,
    TENTHS,
)
from reports.shared.markdown_table import table
from reports.shared.recorded import status_of
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

Figures = Mapping[str, Any]
COMMAND = "make fedcdp"
TABLE_6_ERROR, ACCURACY_ERROR, CHANCE, LEAST_FALL = 2e-4, 0.02, 0.1, 0.9
PRUNING_ERROR, MOST_PRUNED = 0.05, 0.3  # runs of one setting differ by about as much
DECAYED = "Fed-CDP(decay) is more accurate than Fed-CDP"
PRUNED_ACCURACY = "accuracies of Fed-SDP and Fed-CDP with pruned updates"
MEDIAN = "the median of the norms serves as C"
BY_SHARE = (
    "Fed-CDP is more accurate than Fed-SDP with 100 clients, whatever share of them takes part"
)
HIGHEST = {"LFW": (4.0, 6.0)}  # clipping norms of the best accuracy as printed; else 2 and 4
LEMMA_2 = "the epsilon of a row is that of its client"
COMPARED = {  # Fed-CDP, and with a clipping norm that falls; the names of runs but for their repeat
    "stated noise, 100 clients, hidden layer": ("cdp", "cdp_decay"),
    "usable noise, 1,000 clients": ("mnist_fed_row", "fed_row_decay"),
}
RULES = {
    "epsilons (VI)": f"reproduced where all twelve agree within {TABLE_6_ERROR:g}",
    "accuracy at the stated noise (II, IV, V)": "reproduced where Fed-SDP and Fed-CDP reach the "
    f"printed accuracy of 100 clients less {ACCURACY_ERROR:g}",
    "accuracy at the stated noise, Adult, cancer and LFW (IV, V)": f"reproduced where the mean of {len(REPEATS)} runs (LFW: one) of Fed-CDP at sigma 6 "
    f"and C = 4 reaches the printed accuracy less {ACCURACY_ERROR:g}",
    "the accuracy is highest at C = 2 or 4, on LFW at 4 or 6 (IV)": "reproduced where the mean of the runs is highest at one of these and each run there is "
    "more accurate than each at C = 0.5 and 8; differs where so at another between these ends",
    "Fed-CDP is more accurate than Fed-SDP whatever share takes part (II)": "reproduced where, with 100 clients, it is so at all four shares and Fed-CDP exceeds "
    f"chance by more than {CHANCE:g} at each; differs where only the last does not hold",
    "more noise lowers the accuracy (V)": "reproduced where the mean of the runs falls, or stays, with every larger noise; differs where each "
    "run at sigma 8 is less accurate than each at 0.5",
    "the epsilon of a row is that of its client (lemma 2)": "not reproduced where a client's known epsilon is more than 1.01 times that of its row",
    "the stated noise buries the model": "shown where neither run ever exceeds chance by more than "
    f"{CHANCE:g} at its last three checkpoints",
    "a clipping norm that falls (II)": f"reproduced where each of {len(REPEATS)} runs with it is more accurate than each of as "
    "many without, at the stated noise with a hidden layer and at usable noise (by chance once in 20 for each); differs where the mean is "
    "higher in both",
    "accuracy of pruned updates (Figure 5)": f"reproduced where, up to {MOST_PRUNED:.0%} pruned, both are at most "
    f"{PRUNING_ERROR:g} less accurate than without pruning, Fed-CDP is more accurate than Fed-SDP, and both exceed chance by more "
    f"than {CHANCE:g}; differs where only the last does not hold",
    "the median as C (Section V)": f"reproduced where both runs at the median reach the accuracy of the norm that the audit states "
    f"less {ACCURACY_ERROR:g}; differs where one does",
    "cost (III)": COST_RULE,
    "leakage (VII)": LEAKAGE_RULE,
    "norms (Figure 3)": f"reproduced where both are at most {LEAST_FALL:g} times the first in the last tenth",
    "noise limit (Proposition 2)": "refuted as a limit above which predictions are lost where no "
    "more than half of them are lost at 10 times the limit",
}


def render(known: Figures) -> str:
    """The page."""
    accounts, runs = known["accounts"], known.get("runs", {})
    lines = [
        "# Fed-SDP and Fed-CDP: Wei et al. 2021, table by table",
        "",
        f"Made by `{COMMAND}` from [fedcdp.json](fedcdp.json); the paper is {paper.SOURCE}. Epsilons are worst cases at delta",
        f'{paper.DELTA:g} unless a table says otherwise. "Known participation" is an account for',
        "an adversary who knows who took part in which round; neighbours differ in one row or",
        "client that contributes nothing, in batches and rounds that stay. An individual epsilon describes the run that happened;",
        "it is no guarantee.",
        "",
        *status_of(runs),
        *_overview(known),
        *_settings(),
        *_table_6(accounts),
        *_accuracy(runs),
        *_sweeps(runs),
        *_by_share(runs),
        *_decayed(runs),
        *_medians(runs),
        *cost_section(known.get("cost", {})),
        *leakage_section(known.get("leakage", [])),
        *_norms(runs),
        *_proposition(known["proposition_2"]),
        *_what_does_not_hold(accounts),
        *_algorithms(known.get("averaging", {})),
        "## Not run",
        "",
        "- CIFAR-10; 1,000 and 10,000 clients that hold copies.",
        "  [All printed cells](../claims/README.md), with commands and hours.",
        "",
        "## Rules",
        "",
        table(["finding", "when it counts"], [list(row) for row in RULES.items()]),
    ]
    return "\n".join(lines) + "\n"


def findings(known: Figures) -> list[list[str]]:
    """Item, what is asked, and the word of its rule."""
    runs = known.get("runs", {})
    chance = {suffix: verdict_of_chance(runs, suffix) for suffix in ("_cnn", "")}
    return [
        ["VI", "epsilon of Fed-CDP and Fed-SDP", verdict_of_table_6(known["accounts"])],
        ["II, IV, V", "accuracy on MNIST at the stated noise", verdict_of_accuracy(runs)],
        ["II, IV, V", "does the stated noise bury a network with convolutions?", chance["_cnn"]],
        ["II, IV, V", "and one with a hidden layer?", chance[""]],
        *(
            [f"IV, V, {data}", each, word]
            for data in SWEPT
            for each, word in verdicts_of_sweeps(runs, data).items()
        ),
        ["Proposition 1, lemma 2", LEMMA_2, verdict_of_lemma_2(known["accounts"])],
        ["Proposition 2", "a limit of the noise", verdict_of_limit(known["proposition_2"])],
        ["II", BY_SHARE, verdict_of_shares(by_share(runs))],
        ["II", DECAYED, verdict_of_decay(runs)],
        ["Figure 5", PRUNED_ACCURACY, verdict_of_pruning(runs)],
        ["Section V", MEDIAN, verdict_of_median(runs)],
        ["III", "cost of a local step", verdict_of_cost(known.get("cost", {}))],
        *(
            [item.split(",")[0], LEAKAGE_CLAIMS[item], word]
            for item, word in verdicts_of_leakage(known.get("leakage", [])).items()
        ),
        ["Figure 3", "norms fall while training", verdict_of_norms(runs)],
    ]


def _overview(known: Figures) -> Iterator[str]:
    yield from ("## Overview", "", table(["item", "what", "verdict"], findings(known)), "")


def _settings() -> Iterator[str]:
    rows = [
        [name, str(one.rounds), str(one.local_steps), str(one.batch)]
        for name, one in paper.SETTINGS.items()
    ]
    yield from ("## Table I: settings", "")
    yield table(["data", "rounds T", "local steps L", "local batch B"], rows)
    yield from (
        "",
        f"The noise multiplier is {paper.NOISE:g}, the clipping norm {paper.CLIP:g} for each layer,",
        'and CIFAR-10 is as MNIST. Fed-SDP (`protect = "client"`) clips a client\'s update and adds',
        'noise to it; Fed-CDP (`protect = "row"`) clips the gradient of each row in each local',
        "step and adds noise there; see docs/how-to/federated.md.",
        "",
    )


def verdict_of_table_6(accounts: Figures) -> str:
    """Whether all epsilons agree with the paper's."""
    gaps = [
        abs(ours - theirs)
        for name, printed in paper.TABLE_6.items()
        for ours, theirs in zip(accounts["table_6"][name], printed, strict=True)
    ]
    return REPRODUCED if max(gaps) <= TABLE_6_ERROR else NOT_REPRODUCED


def _table_6(accounts: Figures) -> Iterator[str]:
    head = ["data", "", "Fed-CDP, L = 1", "Fed-CDP, L = 100", "Fed-SDP"]
    rows = []
    for name, printed in paper.TABLE_6.items():
        rows.append([name, "paper", *(f"{value:.4f}" for value in printed)])
        rows.append([name, "ours", *(f"{value:.4f}" for value in accounts["table_6"][name])])
    yield from ("## Table VI: epsilon", "", table(head, rows), "")
    yield from (
        "The moments accountant of 2017 at the orders of TensorFlow Privacy, with a rate of",
        f"{paper.STATED_RATE:g} for rows and {paper.CLIENT_RATE:g} for clients. With one local step, and",
        "for Fed-SDP, the paper composes T + 1 rounds. It prints each figure of Fed-CDP for a row",
        "and for a client. What the same runs are worth, with noise once a batch and with flat",
        f"clipping (`row, layers`: each of {paper.LAYERS} layers clipped at C, as stated):",
        "",
    )
    columns = {
        "row": "Fed-CDP, row",
        "row_of_layers": "row, layers",
        "row_in_every_round": "row, every round",
        "client_one_round": "client, one round",
        "client": "client",
        "sdp_secret": "Fed-SDP, client, secret coins",
        "sdp_client": "client, known",
        "sdp_row": "row, known",
    }
    rows = [
        [name, str(found["rounds"]), *(_epsilon(found[key]) for key in columns)]
        for name, found in accounts["honest"].items()
    ]
    yield table(["data", "rounds", *columns.values()], rows)
    frequent = accounts["most_frequent"]
    yield from (
        "",
        "Known participation, for a client that takes part in the number of rounds in the second",
        "column, which is the expected one, or in one round or in every round where the head says",
        "so. Of the secret coins (Poisson) the figure is RDP's. The client that comes most often in",
        "100 rounds comes "
        + ", ".join(
            f"{one['rounds']:.0f} times among {int(clients):,} clients (epsilon {_epsilon(one['epsilon'])})"
            for clients, one in frequent.items()
        )
        + ", in the median.",
        "",
    )


def _epsilon(value: float) -> str:
    """Rounded up, as the tool does; one decimal from 10 on."""
    return (
        f"{math.ceil(10 * value * (1 - 1e-9)) / 10:.1f}" if value >= 10 else format_epsilon(value)
    )


def verdict_of_accuracy(runs: Figures) -> str:
    """Whether the stated noise gives the printed accuracies."""
    pairs = [("sdp_cnn", "Fed-SDP"), ("cdp_cnn", "Fed-CDP")]
    if any(name not in runs for name, _ in pairs):
        return NOT_RUN
    enough = all(
        max(runs[name]["test_accuracy"]) >= paper.TABLE_2[title][0] - ACCURACY_ERROR
        for name, title in pairs
    )
    return REPRODUCED if enough else NOT_REPRODUCED


def verdict_of_lemma_2(accounts: Figures) -> str:
    """Whether a client's epsilon is that of its row."""
    above = any(each["client"] > 1.01 * each["row"] for each in accounts["honest"].values())
    return NOT_REPRODUCED if above else REPRODUCED


def swept(runs: Figures, data: str, key: str) -> list[list[float]]:
    """Accuracies of Fed-CDP at each of `paper.VALUES`, of each run; key: clip (Table IV) or noise (V)."""
    stated = paper.CLIP if key == "clip" else paper.NOISE
    return [
        accuracies(runs, SWEPT[data] + ("" if value == stated else f"_{key}_{value:g}"))
        for value in paper.VALUES
    ]


def verdicts_of_sweeps(runs: Figures, data: str) -> dict[str, str]:
    """Words of what the paper says about Tables IV and V of a data set."""
    by_clip, by_noise = swept(runs, data, "clip"), swept(runs, data, "noise")
    enough = 1 if data in ("MNIST", "LFW") else len(REPEATS)
    best = HIGHEST.get(data, (2.0, 4.0))
    place = f"C = {best[0]:g} or {best[1]:g}, on {data}"
    ran = min(map(len, by_clip + by_noise)) >= enough
    found = {
        f"the accuracy is highest at {place}": interior(by_clip, best) if ran else NOT_RUN,
        f"more noise lowers the accuracy, on {data}": falls(by_noise) if ran else NOT_RUN,
    }
    if data != "MNIST":  # whose network with convolutions is judged by Table II
        printed = dict(zip(paper.VALUES, paper.TABLE_4[data], strict=True))[paper.CLIP]
        near = ran and mean(accuracies(runs, SWEPT[data])) >= printed - ACCURACY_ERROR
        word = REPRODUCED if near else NOT_REPRODUCED if ran else NOT_RUN
        found[f"accuracy on {data} at the stated noise"] = word
    return found


def interior(by_clip: list[list[float]], printed: tuple[float, ...] = (2.0, 4.0)) -> str:
    """Whether accuracies are highest at the printed C, by more than runs differ."""
    means = [mean(each) for each in by_clip]
    best = means.index(max(means))
    if min(by_clip[best]) <= max(by_clip[0] + by_clip[-1]):  # so at the ends, too
        return NOT_REPRODUCED
    return REPRODUCED if paper.VALUES[best] in printed else DIFFERS


def falls(by_noise: list[list[float]]) -> str:
    """Whether accuracies fall with the noise."""
    if all(mean(after) <= mean(before) for before, after in pairwise(by_noise)):
        return REPRODUCED
    return DIFFERS if max(by_noise[-1]) < min(by_noise[0]) else NOT_REPRODUCED


def verdict_of_chance(runs: Figures, suffix: str = "_cnn") -> str:
    """Whether the runs of a network at the stated noise stay at chance."""
    stated = [f"{name}{suffix}" for name in ("sdp", "cdp")]
    if any(name not in runs for name in stated):
        return NOT_RUN
    above = [
        accuracy - RUNS[name].chance
        for name in stated
        for accuracy in runs[name]["test_accuracy"][-3:]
    ]
    return "shown" if max(above) <= CHANCE else "not shown"


def _accuracy(runs: Figures) -> Iterator[str]:
    rows = []
    for name, run in RUNS.items():
        found = runs.get(name)
        if found is None:
            rows.append([run.title, *[NOT_RUN] * 8])
            continue
        client = found.get("client_known", found.get("known"))
        median = found.get("client_known_median", found.get("known_median"))
        row = found if found.get("unit") == "example" else {}
        rows.append(
            [
                run.title + ", stated noise" * run.stated,
                str(found["step"][-1]),
                f"{found['test_accuracy'][-1]:.4f}",
                f"{max(found['test_accuracy']):.4f}",
                f"{run.chance:.2f}",
                _or_none(row.get("known"), row.get("known_median")),
                _or_none(client, median),
                _or_none(found.get("secret") if not row else None),
                f"{found['delta']:g}",
            ]
        )
    head = ["run", "rounds", "accuracy", "best", "chance"]
    head += [
        "row, known: worst (median)",
        "client, known: worst (median)",
        "client, secret",
        "delta",
    ]
    printed = ", ".join(f"{name} {value[0]:.3f}" for name, value in paper.TABLE_2.items())
    yield from ("## Tables II, IV and V: accuracy", "", table(head, rows), "")
    yield from (
        f"The paper prints for MNIST with 100 clients, 10 in a round: {printed}. Ours at the stated",
        f"noise: sigma {paper.NOISE:g} and C = {paper.CLIP:g} for each tensor of a network with two convolutions, as",
        "the paper's, and of one with a hidden layer of 64; two shards of labels a client, 10",
        f"clients by lot, learning rate {paper.LOCAL_RATE:g}, which is that of the",
        "published code (the paper gives none). Runs at usable noise are the audits of their names",
        "in audits/, with flat clipping. Epsilons are worst cases, and medians of individual ones,",
        "at the delta of the run; secret ones assume independent coins that stay secret. An empty",
        "cell is a unit that the run does not protect, or a sampler without secret coins.",
        "",
    )


def _sweeps(runs: Figures) -> Iterator[str]:
    """Accuracy by clipping norm, by noise, by what is sent, and with copies; empty without runs."""
    moved: list[tuple[str, str, float | None, str]] = []  # what, its value, the paper's, our runs
    for data, name in SWEPT.items():
        for what, key, stated, printed in (
            ("C", "clip", paper.CLIP, paper.TABLE_4),
            ("sigma", "noise", paper.NOISE, paper.TABLE_5),
        ):
            for value, theirs in zip(paper.VALUES, printed[data], strict=True):
                suffix = "" if value == stated else f"_{key}_{value:g}"
                moved.append((f"{what}, {data}", f"{value:g}", theirs, f"{name}{suffix}"))
    moved += [
        (f"no DP, {data}", "–", paper.TABLE_1[data], SWEPT[data].replace("cdp", "no_dp"))
        for data in paper.TABLE_1
    ]
    for title, system in (("no DP", ""), ("Fed-SDP", "sdp_"), ("Fed-CDP", "cdp_")):
        for value in (0.0, *PRUNED):
            name = f"{system}pruned_{value:g}" if value else system.rstrip("_") or "no_dp"
            moved.append((f"pruned, {title}", f"{value:.0%}", None, name))
    moved.append(("copies, 1,000 clients", str(COPIES), None, "cdp_copies"))
    rows = []
    for what, value, theirs, name in moved:
        if found := accuracies(runs, name):
            spread = f" ({min(found):.3f} to {max(found):.3f})" if found[1:] else ""
            rows.append(
                [
                    what,
                    value,
                    "–" if theirs is None else f"{theirs:.3f}",
                    f"{mean(found):.3f}{spread}",
                    _of_worst([runs[f"{name}{x}"] for x in REPEATS if f"{name}{x}" in runs]),
                ]
            )
    if not rows:
        return
    head = [
        "what moves",
        "value",
        "paper",
        "ours",
        "row (with Fed-SDP: client), known: worst (median)",
    ]
    yield from ("## Tables IV and V, Figure 5: what moves the accuracy", "", table(head, rows), "")
    yield from (
        "100 clients, 10 in a round; Fed-CDP with sigma 6 and C = 4 where not said. MNIST: the network with a hidden layer, 40 rounds.",
        "Adult and cancer: as in Table I, two hidden layers of 64 units, whose sizes the paper does not say, a random partition; each client",
        "of cancer draws as many rows as there are from 100 copies. LFW: who is it of 62 people, the network with convolutions, 60 rounds, of each client 300",
        "of 14 copies of the pictures, of about 15 people; the paper names its number of pictures and people, not how they are dealt. Where there are three runs: mean, range and the largest epsilon. A model that says the",
        "most frequent class is right for 76 % of Adult, for 63 % of cancer and for 17 % of LFW. Runs on the two took three CPU minutes. The unit of copies is the original row: they add up. Pruned: each client leaves out the",
        "smallest coordinates after noise was added, with Fed-SDP by the clients together; as they do not leave out the same ones, only",
        "a client's own noise counts in its epsilon. The paper's accuracies stand in a picture, for 1,000 clients of which 100 take part.",
        "",
    )


def _of_worst(runs: list[Figures]) -> str:
    """Worst case and median of the run whose worst case is largest."""
    worst = max(runs, key=lambda run: run.get("known", 0.0))
    return _or_none(worst.get("known"), worst.get("known_median"))


def accuracies(runs: Figures, name: str) -> list[float]:
    """At the end of each run of a setting."""
    found = (runs.get(f"{name}{repeat}") for repeat in REPEATS)
    return [run["test_accuracy"][-1] for run in found if run is not None]


def by_share(runs: Figures) -> dict[str, list[float]]:
    """Accuracies of 100 clients by system, at shares of a round that rise; empty where a run is missing."""
    names = {"no DP": "no_dp", "Fed-SDP": "sdp", "Fed-CDP": "cdp", "Fed-CDP(decay)": "cdp_decay"}
    shares = sorted((*SHARES, paper.CLIENT_RATE))
    suffixes = ["" if share == paper.CLIENT_RATE else f"_{share:g}" for share in shares]
    found = {
        title: [accuracies(runs, f"{name}_cnn{suffix}") for suffix in suffixes]
        for title, name in names.items()
    }
    if not all(map(all, found.values())):
        return {}
    return {title: [mean(each) for each in row] for title, row in found.items()}


def verdict_of_shares(found: Mapping[str, list[float]]) -> str:
    """Whether Fed-CDP is more accurate than Fed-SDP at every share."""
    if not found:
        return NOT_RUN
    if any(row <= client for client, row in zip(found["Fed-SDP"], found["Fed-CDP"], strict=True)):
        return NOT_REPRODUCED
    return REPRODUCED if min(found["Fed-CDP"]) > RUNS["cdp"].chance + CHANCE else DIFFERS


def _by_share(runs: Figures) -> Iterator[str]:
    if not (found := by_share(runs)):
        return
    shares = sorted((*SHARES, paper.CLIENT_RATE))
    head = ["system", *(f"{share:.0%}: paper, ours" for share in shares)]
    rows = [
        [
            title,
            *(
                f"{theirs:.3f}, {ours:.4f}"
                for theirs, ours in zip(printed, found[title], strict=True)
            ),
        ]
        for title, printed in paper.BY_SHARE.items()
    ]
    yield from ("## Table II: the share of 100 clients that takes part", "", table(head, rows), "")
    yield from (
        "The network with convolutions, the stated noise, 100 rounds, one run each. By chance a model is right for 10 %.",
        "",
    )


def verdict_of_decay(runs: Figures) -> str:
    """Whether a clipping norm that falls makes Fed-CDP more accurate."""
    pairs = [[accuracies(runs, name) for name in names] for names in COMPARED.values()]
    if any(len(each) < len(REPEATS) for pair in pairs for each in pair):
        return NOT_RUN
    if all(min(decayed) > max(constant) for constant, decayed in pairs):
        return REPRODUCED
    higher = all(mean(decayed) > mean(constant) for constant, decayed in pairs)
    return DIFFERS if higher else NOT_REPRODUCED


def verdict_of_pruning(runs: Figures) -> str:
    """Whether pruned updates leave Fed-SDP and Fed-CDP their accuracy, and their order."""
    shares = ["", *(f"_pruned_{share:g}" for share in PRUNED if share <= MOST_PRUNED)]
    if any(f"{name}{share}" not in runs for name in ("sdp", "cdp") for share in shares):
        return NOT_RUN
    sdp, cdp = (
        [mean(accuracies(runs, f"{name}{share}")) for share in shares] for name in ("sdp", "cdp")
    )
    kept = all(min(each) >= each[0] - PRUNING_ERROR for each in (sdp, cdp))
    if not kept or any(row <= client for client, row in zip(sdp, cdp, strict=True)):
        return NOT_REPRODUCED
    return REPRODUCED if min(sdp + cdp) > RUNS["cdp"].chance + CHANCE else DIFFERS


def verdict_of_median(runs: Figures) -> str:
    """Whether the median of the clients' first updates does as well as the norm of the audit."""
    if any(name not in runs for name in (*MEDIANS, "mnist_fed_client")):
        return NOT_RUN
    least = runs["mnist_fed_client"]["test_accuracy"][-1] - ACCURACY_ERROR
    enough = [runs[name]["test_accuracy"][-1] >= least for name in MEDIANS]
    return REPRODUCED if all(enough) else DIFFERS if any(enough) else NOT_REPRODUCED


def _decayed(runs: Figures) -> Iterator[str]:
    rows = []
    for title, names in COMPARED.items():
        for name, law in zip(names, ("constant", "falls"), strict=True):
            found = accuracies(runs, name)
            shown = ", ".join(f"{accuracy:.4f}" for accuracy in found)
            rows.append([title, law, shown, f"{mean(found):.4f}"] if found else [])
    for name, law in (("cdp_cnn", "constant"), ("cdp_decay_cnn", "falls")):
        if name in runs:
            last = f"{runs[name]['test_accuracy'][-1]:.4f}"
            rows.append(["stated noise, 100 clients, convolutions", law, last, last])
    if verdict_of_decay(runs) == NOT_RUN:
        return
    head = ["setting", "clipping norm", "accuracy of each run", "mean"]
    yield from ("## Table II: a clipping norm that falls", "", table(head, rows), "")
    yield from (
        f"C falls linearly from {DECAY['start']:g} to {DECAY['end']:g} over the rounds, as stated, where it is {paper.CLIP:g} otherwise; "
        "at usable noise",
        "(`audits/mnist_fed_row.toml`) in the same proportion. The noise multiplier stays, so epsilons are those of the constant norm.",
        "The paper prints "
        + ", ".join(
            f"{paper.TABLE_2[name][0]:.3f} for {name}" for name in ("Fed-CDP", "Fed-CDP(decay)")
        )
        + ".",
        "",
    )


def _medians(runs: Figures) -> Iterator[str]:
    if verdict_of_median(runs) == NOT_RUN:
        return
    base = runs["mnist_fed_client"]
    stated = f"{RUNS['mnist_fed_client'].config().training.max_grad_norm:.3f}"
    rows = [["of the audit", stated, f"{base['test_accuracy'][-1]:.4f}", _epsilon(base["secret"])]]
    rows += [
        [
            title,
            f"{runs[name]['max_grad_norm']:.3f}",
            f"{runs[name]['test_accuracy'][-1]:.4f}",
            _epsilon(runs[name]["secret"] + MEDIAN_EPSILON),
        ]
        for title, name in zip(
            ("median, learning rate of the audit", "median, learning rate that follows it"),
            MEDIANS,
            strict=True,
        )
    ]
    head = ["clipping norm", "C", "accuracy", "client, secret"]
    yield from ("## Section V: the median of the norms as C", "", table(head, rows), "")
    yield from (
        "`audits/mnist_fed_client.toml` (Fed-SDP, 1,000 clients), clipped at the median of what all clients would send in a first",
        f"round. It is drawn with epsilon {MEDIAN_EPSILON:g} of a client, which the last column includes. The paper takes the median",
        "of a client's own updates as it is, which no epsilon covers. In the last row the learning rate of the server is such that",
        "the model has as much noise as in the first.",
        "",
    )


NORMS = {
    "mnist_fed_client": "updates of clients (Fed-SDP)",
    "mnist_fed_row": "gradients of rows (Fed-CDP)",
}


def verdict_of_norms(runs: Figures) -> str:
    """Whether norms fall from the first tenth of training to the last."""
    found = [runs.get(name, {}).get("norms") for name in NORMS]
    if not all(found):
        return NOT_RUN
    return REPRODUCED if all(each[-1] <= LEAST_FALL * each[0] for each in found) else NOT_REPRODUCED


def _norms(runs: Figures) -> Iterator[str]:
    rows = [
        [title, *(f"{norm:.3g}" for norm in runs[name]["norms"])]
        for name, title in NORMS.items()
        if runs.get(name, {}).get("norms")
    ]
    if not rows:
        return
    head = ["norms of", *(f"{100 * part // TENTHS} %" for part in range(1, TENTHS + 1))]
    yield from ("## Figure 3: norms over training", "", table(head, rows), "")
    yield from (
        "Means before clipping, over the clipping norm and rounded up, in each tenth of the rounds; 1,000",
        "clients of MNIST at usable noise.",
        "The paper draws the mean norm of the gradients of 100 clients, which declines.",
        "",
    )


def _or_none(value: float | None, median: float | None = None) -> str:
    if value is None:
        return "–"
    return _epsilon(value) if median is None else f"{_epsilon(value)} ({_epsilon(median)})"


def verdict_of_limit(found: Figures) -> str:
    """Whether noise beyond the limit loses predictions."""
    lost = dict(zip(MULTIPLES, found["lost"]["random"], strict=True))
    return "refuted" if lost[10.0] <= 0.5 else "not refuted"


def _proposition(found: Figures) -> Iterator[str]:
    head = ["direction", *(f"{multiple:g} r" for multiple in MULTIPLES)]
    rows = [
        [name, *(f"{share:.1%}" for share in found["lost"][key])]
        for name, key in (("random, as noise", "random"), ("down the gradient", "gradient"))
    ]
    yield from (
        "## Proposition 2",
        "",
        "As stated: noise may not exceed the margin of a prediction over a Lipschitz constant. The",
        "paper calls the bound an upper and a lower one, and puts the norm of a gradient at one",
        "point in place of the constant, which has to hold along the whole path. Here r is the",
        "margin over the norm of its gradient in all parameters, of each test example that a small",
        f"network on digits ({found['parameters']:,} parameters, accuracy {found['accuracy']:.3f}) classifies rightly;",
        "the table gives predictions lost when the parameters move by multiples of r:",
        "",
        table(head, rows),
        "",
        "r limits a shift in the worst direction, and only as far as the network is linear. Noise has",
        "a random direction, nearly at right angles to the gradient, so that r is no limit of its",
        f"length. The median of r is {found['median']:.2f}. The stated noise of one local step, at the learning rate",
        f"{paper.LOCAL_RATE:g}, has the length {found['noise_length']:.1f}: {found['noise_length'] / found['median']:.0f} times that.",
        "",
    )


def _what_does_not_hold(accounts: Figures) -> Iterator[str]:
    mnist, coins = accounts["honest"]["MNIST"], accounts["shared_coins"]
    fixed, copies = accounts["fixed_size"], accounts["copies"]
    printed = paper.TABLE_6["MNIST"]
    yield from (
        "## What does not hold",
        "",
        "- **Rates may not be multiplied.** All rows of a client share one coin, and the rest of its",
        "  update tells whether it came. A client's coin of 0.05, then 100 local steps at the rate",
        "  0.01 with noise multiplier 1, are accounted as 100 steps of rate 0.0005: "
        f"{coins['moments'][0]:.2f} by the moments",
        f"  accountant, where the same rule gives {coins['moments'][1]:.2f} with one coin; "
        f"{_epsilon(coins['pld'][0])} against {_epsilon(coins['pld'][1])} by loss distributions.",
        "- **The epsilon of a row is not that of its client.** The client puts B clipped rows into",
        f"  each of L steps: {_epsilon(mnist['client_one_round'])} for one round of MNIST and {_epsilon(mnist['client'])} for ten, where "
        f"{printed[1]:.4f}",
        f"  is printed; {_epsilon(mnist['client_one_round_one_step'])} for one round of one local step.",
        "- **Fed-SDP does protect a row**: changing one replaces its client's update, which is twice as",
        f"  far. Known participation in ten rounds: {_epsilon(mnist['sdp_row'])} for a row and {_epsilon(mnist['sdp_client'])} for a client.",
        f"- **Clipping each of M layers at C is not accounted by sigma**, but by sigma / sqrt(M): "
        f"{_epsilon(mnist['row_of_layers'])}",
        f"  instead of {_epsilon(mnist['row'])} for a row in ten rounds, with {paper.LAYERS} layers.",
        "- **The code draws a fixed number of clients, and the accountant assumes independent coins.**",
        "  At the rate 0.1 in 100 rounds, a client who is added or removed by coins has "
        + " and ".join(
            f"{_epsilon(coin)} at sigma {float(noise):g}" for noise, (coin, _) in fixed.items()
        )
        + ";",
        "  what is proven of a fixed number, where a client is replaced by another, is "
        + " and ".join(_epsilon(drawn) for _, drawn in fixed.values())
        + ".",
        "- **Copies are not more rows.** The published code deals 50,000 images to 1,000 (10,000) clients",
        "  of 500, so that each lies in 10 (100). An image of which every copy takes part in ten rounds,",
        f"  never two in the same, has {_epsilon(copies['10'])} ({_epsilon(copies['100'])}) where {printed[1]:.4f} is printed. For cancer every client",
        f"  holds every row: {_epsilon(accounts['cancer_copies'])} after three rounds of ten clients, where "
        f"{paper.TABLE_6['cancer'][1]:.4f} is printed.",
        "- **Noise that the published code does not add.** There, the noise of Fed-SDP is multiplied by 0",
        "  and its updates are not clipped, the line that adds the noise of Fed-CDP is commented out,",
        "  and sigma is 0.5. The rows of the stated noise above show what it does to a model.",
        "- **A mean squared error below 0.70 is no success** of a reconstruction: see",
        "  [the page of the companion paper](../wei2021/README.md), where a grey picture succeeds.",
    )


def _algorithms(found: Figures) -> Iterator[str]:
    """What does not hold of the algorithms as they are printed."""
    std, batch = paper.NOISE * paper.CLIP, paper.SETTINGS["MNIST"].batch
    yield from (
        "- **The printed algorithms are not the published code.** Algorithm 1 divides by the number of",
        "  clients twice. Algorithm 2 adds noise to each row, so that the mean of a batch has noise of",
        f"  {std / math.sqrt(batch):.1f} in each coordinate, its code once a batch: {std / batch:.1f}. Only the first protects the",
        "  gradient of a row from who reads it.",
    )
    if found:
        yield from (
            "- **FedSGD and FedAveraging are not equivalent.** To average models or updates is the same",
            f"  (they differ by {found['models']:.0e} of their length, on digits), but FedSGD takes one step on all",
            f"  local rows: {found['fedsgd']:.0%} of the length away from as many steps together as long.",
        )
    yield ""
