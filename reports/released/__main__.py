"""reports/released/README.md and released.json beside it: attackers of the released model only.

python -m reports.released [--canaries] [--write-only]

Everything is trained by this command and goes on where it was stopped, in reports/runs/released;
--canaries leaves the studies as they are in released.json. MNIST is read from the folder in
INDPRIV_DATA. All takes about half an hour on one core, canaries ten minutes of it.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from audits.training.datasets import Dataset
from audits.training.models import first_parameters
from audits.training.shadows import trainer_of
from indpriv._files import read_json, write_json
from indpriv._formatting import format_epsilon, format_lower_bound
from indpriv.analysis.attacks.rates import rates_over_models
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.released import last_iterate_epsilon, last_iterate_rate
from indpriv.norm_log.fields import StepSettings
from indpriv.recording import AuditSpec, per_example_gradient_norms, released_model
from reports import REPORTS
from reports.attacks.figures import figures_of
from reports.attacks.training import BASELINE, DP, SEED, TASKS, Task
from reports.released.canaries import CRAFTED, UPDATES, WRONG
from reports.released.canaries import figures as figures_of_canaries
from reports.shared.markdown_table import table
from reports.shared.rates import HEAD, RATES, limit, number, rates, student

FOLDER, HERE = REPORTS / "runs" / "released", REPORTS / "released"
MODELS, ALONE = 8, 4  # models of a study, and how many of them are attacked without references
THRESHOLD = "loss_threshold"
ON_MODELS = (THRESHOLD, "quantile", "input_quantile", "gradient_norm", "gradient_ratio")
ON_SIGNALS = ("rmia", "lira", "several_lira", "gradient_lira")
KINDS = {"confidence": "confidence", "labels": "label_robustness", "gradients": "other"}
TITLES = {DP: "with DP", BASELINE: "without DP"}


def study(task: Task, kind: str, folder: Path, data: Dataset) -> dict[str, Any]:
    """Train the models of one study, and attack each; what is in the folder is not done again."""
    trainer = trainer_of(task.config, data, without_dp=kind == BASELINE)
    rng = np.random.default_rng([SEED, 44])
    n = len(data.train)
    targets = np.sort(rng.permutation(n)[: n // 2])
    coins = rng.random((MODELS, len(targets))) < 0.5
    kept = []
    for row in range(MODELS):
        path = folder / f"{task.name}-{kind}-{row}.npz"
        if not path.is_file():
            member = np.ones(n, dtype=bool)
            member[targets] = coins[row]
            fitted = trainer.fit(np.flatnonzero(member), row)
            module = module_of(fitted.states[-1], task, data)
            arrays = dict(trainer.signals(fitted, targets))
            arrays["gradients"] = -np.log(norms_of(module, data, targets) + 1e-12)
            if row < ALONE:
                arrays |= alone(module, task, data, member)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **arrays)
            print(path.name, flush=True)  # noqa: T201
        kept.append(dict(np.load(path)))
    scores = {name: list(saved(kept[:ALONE], name)) for name in ON_MODELS}
    series = {
        name: AttackSignals.from_arrays(
            np.stack([one[name] for one in kept]), coins, targets, kind=of, coins=True
        )
        for name, of in KINDS.items()
    }
    again = {name: partial(of_models, name, series) for name in ON_SIGNALS}
    scores |= {name: list(of(np.arange(MODELS))) for name, of in again.items()}
    found = {
        name: {
            "title": ATTACKS[name].title,
            "sees": ATTACKS[name].sees,
            "models": len(each),
            **figures_of(rates_over_models(each, again.get(name))),
        }
        for name, each in scores.items()
    }
    return {"attacks": found, "targets": len(targets), "jackknife": True}


def of_models(
    name: str, series: Mapping[str, AttackSignals], rows: np.ndarray
) -> Iterator[AttackScores]:
    """The scores of one attack on each of these models, with the others of them as references."""
    kept = {
        key: replace(one, signal=one.signal[rows], member=one.member[rows])
        for key, one in series.items()
    }
    return (ATTACKS[name].unchecked(Material(**kept), row) for row in range(len(rows)))


def module_of(state: Mapping[str, Any], task: Task, data: Dataset) -> nn.Module:
    """The model at these parameters."""
    module = first_parameters(task.config.model, data.input_shape, data.n_classes, 0)
    module.load_state_dict(state)
    return module.eval()


def norms_of(module: nn.Module, data: Dataset, targets: np.ndarray) -> np.ndarray:
    """Norms of the gradients of one model on the targets."""
    loss_fn, norms = nn.CrossEntropyLoss(reduction="none"), []
    for part in np.array_split(targets, max(1, len(targets) // 1000)):
        inputs, labels = (
            torch.from_numpy(each[part]) for each in (data.train.inputs, data.train.targets)
        )
        norms.append(per_example_gradient_norms(module, loss_fn, inputs, labels).double().numpy())
    return np.concatenate(norms)


def alone(
    module: nn.Module, task: Task, data: Dataset, member: np.ndarray
) -> dict[str, np.ndarray]:
    """Scores of the attacks without references: of all that the model was trained on, and others."""
    inputs = [data.train.inputs[member], data.train.inputs[~member], data.test.inputs]
    labels = [data.train.targets[member], data.train.targets[~member], data.test.targets]
    spec = AuditSpec(
        model=lambda: first_parameters(task.config.model, data.input_shape, data.n_classes, 0),
        dataset=TensorDataset(torch.from_numpy(inputs[0]), torch.from_numpy(labels[0])),
        test_set=TensorDataset(
            torch.from_numpy(np.concatenate(inputs[1:])),
            torch.from_numpy(np.concatenate(labels[1:])),
        ),
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
    )
    known = released_model(module, spec)
    material, found = Material(losses=known.examples, released=known), {}
    for name in ON_MODELS:
        scores = ATTACKS[name].scores(material)
        found |= {f"{name}_scores": scores.scores, f"{name}_member": scores.member}
    return found


def saved(kept: list[dict[str, np.ndarray]], name: str) -> Iterator[AttackScores]:
    """The scores of one attack on each model."""
    for row, one in enumerate(kept):
        member = one[f"{name}_member"]
        model = np.full(len(member), row)
        yield AttackScores(one[f"{name}_scores"], member, ATTACKS[name].title, model=model)


def heuristic(task: Task, data: Dataset) -> dict[str, float]:
    """What the heuristic of the last iterate says of this training."""
    settings = trainer_of(task.config, data, without_dp=False).settings
    of = StepSettings.from_values(
        settings["planned_steps"],
        np.asarray(settings["noise_multiplier"]),
        1.0,
        1 / settings["steps_per_epoch"],
    )
    delta = task.config.training.delta
    rate = {one: last_iterate_rate(of, float(one)) for one in RATES}
    return {"epsilon": last_iterate_epsilon(of, delta=delta), "tpr_at_fpr": rate}


def figures(task: Task) -> dict[str, Any]:
    """Both studies of one task, and the heuristic."""
    data = task.dataset()
    found: dict[str, Any] = {kind: study(task, kind, FOLDER, data) for kind in (DP, BASELINE)}
    return {"title": task.title, "heuristic": heuristic(task, data), **found}


def share(found: Mapping[str, Any], ceiling: float) -> str:
    """How much of the way from chance to the ceiling the true-positive rate at 1 % goes."""
    span = found["tpr_at_fpr_intervals"]["0.01"]
    value, *ends = (
        100 * (rate - 0.01) / (ceiling - 0.01)
        for rate in (found["tpr_at_fpr"]["0.01"], *((span["low"], span["high"]) if span else ()))
    )
    return f"{value:.0f}" + (f" ({ends[0]:.0f} to {ends[1]:.0f})" if ends else "")


SEES = {
    "labels": "labels",
    "losses": "losses",
    "references": "confidences, 7 references",
    "model": "parameters",
}


MORE = {"gradient_lira": ", 7 references", "input_quantile": " and inputs"}
NOTHING = " Even without DP nothing was shown of them: this model does not memorise, and a bound of 0 is no evidence of privacy."
BLACK_BOX = ("labels", "losses", "references")
LADDER_HEAD = (
    "attacker",
    "attack",
    "AUC",
    "share of every update, %",
    "TPR at 1 % FPR, %",
    "epsilon of at least",
)
LANGUAGE = {"text_loss": "black box", "gradient": "its parameters", "updates": "every update"}


def ladder(found: Mapping[str, Any], language: Mapping[str, Any]) -> list[str]:
    """The strongest attack of each attacker, by task with DP."""
    lines = [
        "## The ladder",
        "",
        "With DP, from the attacker who sees least to the one who sees every noisy update. Of the attacks in the tables below, the",
        "one with the largest AUC stands for its attacker: it was chosen after seeing them. Canaries are another question: how much an",
        "example *can* leave that was made to be found. The share is how far the AUC goes from 1/2 towards that of gradient canaries at the",
        "clipping norm, which meet the worst case: true-positive rates at 1 % are of too few canaries for that. The epsilon is the lower bound",
        "from one run in f-DP, which assumes nothing but the coins, the mean over runs; 0 means that nothing was shown. Intervals are over",
        "models or runs; of one run, over its canaries.",
        "",
    ]
    for part in found.values():
        made, attacks = part.get("canaries"), part[DP]["attacks"]
        if made is None:
            continue
        most = made[DP][UPDATES]["auc"]
        rows = [
            ("black box", best["title"], best, None) for best in [strongest(attacks, BLACK_BOX)]
        ]
        rows += [
            ("its parameters", best["title"], best, None)
            for best in [strongest(attacks, ("model",))]
        ]
        rows += [
            (who, one["title"], one, one["bounds"]["epsilon_fdp"])
            for who, name in (
                ("black box", WRONG),
                ("black box", CRAFTED),
                ("every update", UPDATES),
            )
            for one in [made[DP][name]]
        ]
        meant = made[DP][UPDATES]
        lines += [
            f"### {part['title']}",
            "",
            table(LADDER_HEAD, [ladder_row(*row, most) for row in rows]),
            "",
        ]
        lines += [
            f"{made['count']} canaries in each of {made['runs']} runs, mislabelled test examples or random inputs crafted with the same labels",
            f"for the parameters of the start, and {made['gradients']:,} gradient canaries in one run. Epsilon {format_epsilon(meant['epsilon'])} at: {meant['meaning']}.",
            "Runs of canaries are not seeded."
            + "".join(
                f" Earlier ones, {one['runs']} and one of gradient canaries, gave AUCs of "
                + ", ".join(
                    f"{number(part['auc'], part['auc_interval'], digits=3)} ({part['title']})"
                    for part in one[DP].values()
                )
                + "."
                for one in made.get("before", ())
            ),
            "Without DP: "
            + "; ".join(
                f"{one['title']}, AUC {one['auc']:.3f}, TPR {100 * one['tpr_at_fpr']['0.01']:.1f} % at 1 %, epsilon of at least {format_lower_bound(one['bounds']['epsilon_fdp'])}"
                for one in (made[BASELINE][WRONG], made[BASELINE][CRAFTED])
            )
            + "."
            + NOTHING * (made[BASELINE][CRAFTED]["bounds"]["epsilon_fdp"] == 0),
            "",
        ]
    for model in language["models"]:
        if model["epsilon"] is None:
            continue
        attacks, updates = model["attacks"], model["attacks"].get("updates")
        rows = [
            ladder_row(who, TEXTS[name], one, one["epsilon_fdp"], updates and updates["auc"])
            for name, who in LANGUAGE.items()
            if (one := attacks.get(name))
        ]
        at = f" at: {model['meaning']}" if "meaning" in model else ""
        lines += [
            f"### Language model, {model['title']}",
            "",
            table(LADDER_HEAD, rows),
            "",
            "The secrets of [the page on language models](../language/README.md) are the canaries: tokens cannot be crafted by gradients.",
            f"Epsilon {format_epsilon(model['epsilon'])}{at}."
            + " Every update was not attacked." * (updates is None),
            "",
        ]
    return lines


TEXTS = {
    "text_loss": "loss of inserted secrets",
    "gradient": "norm of the final gradient of inserted secrets",
    "updates": "likelihood ratio of gradient canaries",
}


def strongest(attacks: Mapping[str, Any], sees: tuple[str, ...]) -> Mapping[str, Any]:
    """The attack with the largest AUC among those of some attackers."""
    chosen: Mapping[str, Any] = max(
        (one for one in attacks.values() if one["sees"] in sees), key=lambda one: one["auc"]
    )
    return chosen


def ladder_row(
    who: str, title: str, one: Mapping[str, Any], bound: float | None, most: float | None
) -> tuple[str, ...]:
    """One row of the ladder; most: the AUC of the attacker of every update."""
    span = one.get("auc_interval") or {key: one[key] for key in ("low", "high")}
    return (
        who,
        title,
        number(one["auc"], span, digits=3),
        "–" if most is None else f"{100 * (one['auc'] - 0.5) / (most - 0.5):.0f}",
        f"{100 * one['tpr_at_fpr']['0.01']:.1f}" if "tpr_at_fpr" in one else "–",
        "–" if bound is None else format_lower_bound(bound),
    )


def render(
    found: Mapping[str, Any], earlier: Mapping[str, Any], language: Mapping[str, Any]
) -> str:
    """The page; earlier: attacks.json, which has the ceilings; language: language.json."""
    lines = [
        "# Attackers of the released model only",
        "",
        "Made by `python -m reports.released` from [released.json](released.json). These attackers stand between the",
        "black box of [the page on attacks](../attacks/README.md) and [the one who sees every update](../validation/README.md): they have",
        "the parameters of the final model, or the inputs, or several signals at once.",
        "",
        f"A study trains {MODELS} models on half of the training set and, by a fair coin each, on the other examples. With",
        f"references, every model is attacked with the {MODELS - 1} others; without, the first {ALONE} models are attacked, with half",
        "of all examples that the model did not see as the attacker's hold-out. Rates are means over models with 95 % intervals",
        "over models. The share of the ceiling is how far the true-positive rate at 1 % false positives goes from 1 % towards the",
        "worst case. All seeds were fixed before the first result. Models are trained from chosen seeds: none has a guarantee.",
        "",
        *student(*(part[kind] for part in found.values() for kind in (DP, BASELINE))),
        *ladder(found, language),
    ]
    for name, part in found.items():
        ceiling = earlier[name]["run"]["ceilings"]["worst_case"]
        epsilon = earlier[name]["run"]["epsilon"]
        lines += [f"## {part['title']}", ""]
        for kind in (DP, BASELINE):
            head = ("attack", "sees", *HEAD) + ("share of the ceiling, %",) * (kind == DP)
            order = sorted(part[kind]["attacks"].items(), key=lambda each: each[1]["auc"])
            rows = [
                (
                    one["title"],
                    SEES[one["sees"]] + MORE.get(key, ""),
                    *rates(one),
                )
                + ((share(one, ceiling["0.01"]),) if kind == DP else ())
                for key, one in order
            ]
            if kind == DP:
                guess = part["heuristic"]["tpr_at_fpr"]
                reach = 100 * (guess["0.01"] - 0.01) / (ceiling["0.01"] - 0.01)
                cells = (f"{100 * guess[rate]:.2f}" for rate in RATES)
                rows.append(
                    ("*heuristic of the last iterate*", "parameters", "", *cells, f"{reach:.0f}")
                )
                cells = (limit(100 * ceiling[rate], 2) for rate in RATES)
                rows.append(("*worst case*", "every noisy update", "", *cells, "100"))
            lines += [f"### {TITLES[kind]}", "", table(head, rows), ""]
        lines += [
            f"The heuristic of the last iterate (Steinke et al. 2024, arXiv:2410.06186) gives epsilon {format_epsilon(part['heuristic']['epsilon'])} where",
            f"{format_epsilon(epsilon)} is accounted. It is exact for linear losses, and **no bound** for this model: a better attack may exceed it.",
            "",
        ]
    return "\n".join(lines)


def _aucs(made: Mapping[str, Any]) -> list[float]:
    return [part["auc"] for part in made[DP].values()]


def main() -> None:
    """Train what is missing, attack it, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.released")
    parser.add_argument(
        "--write-only", action="store_true", help="write the page from released.json"
    )
    parser.add_argument("--canaries", action="store_true", help="leave the studies as they are")
    options, path = parser.parse_args(), HERE / "released.json"
    if not options.write_only:
        found = read_json(path) if path.is_file() else {}
        for task in TASKS:
            known = found.get(task.name, {})
            part = found[task.name] = known if known and options.canaries else figures(task)
            made, last = figures_of_canaries(task, FOLDER), dict(known.get("canaries", {}))
            before = last.pop("before", [])  # of runs that are not seeded none is left out
            if last and _aucs(last) != _aucs(made):  # bounds of the same runs may have other rules
                before.append(last)
            part["canaries"] = made | ({"before": before} if before else {})
            write_json(path, found)
    others = (read_json(REPORTS / name / f"{name}.json") for name in ("attacks", "language"))
    page = render(read_json(path), *others)
    (HERE / "README.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
