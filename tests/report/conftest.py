"""Audits of all kinds, made by hand: together they meet every branch of every template."""

from dataclasses import replace

import numpy as np
import pytest

from indpriv.analysis.attacks.rates import ALL, UPDATES, rates_of
from indpriv.analysis.disclosures import Exactness
from indpriv.analysis.fidelity import Tightness
from indpriv.analysis.reconstruction import reconstruction_of
from indpriv.analysis.recorded_run import Declared
from indpriv.analysis.summary import Audit
from indpriv.attack_scores import AttackScores
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import CHECKS as OF_CHECKS
from indpriv.norm_log.evidence import NOT_COMPARED
from indpriv.norm_log.fields import RecordingPolicy
from reconstructions import scores
from summaries import CHECKS, summary_of
from synthetic import epsilon_table, small_run, sound_checks


@pytest.fixture(scope="session")
def run():
    return small_run()


@pytest.fixture(scope="session")
def summary(run):
    return summary_of(*run)


def failed(key, found):
    return OF_CHECKS[key].fact("failed", found)


def interval(low, high):
    return {"low": low, "high": high}


@pytest.fixture(scope="session", name="with_content")
def _with_content():
    return with_content


HOSTILE = [
    "[red]loud[/red]",
    "[link=file:///etc]x[/link]",
    "\x1b[31mred\x07\x00\x9b",
    "\u202eevil\u2066",
    "a\n\n# b\n```\nc",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "]]> --> </style>",
    "```block\n0\n```",
    "a|b `c` *d* _e_ [f](http://g) ![h](i) &lt; $x^2$",
    "\ue000\ue001 \ufdd0",
    "=cmd|'/c calc'!A1",
    "1. one",
    "> [!CAUTION]",
    "👩\u200d🔬",
]


@pytest.fixture(scope="session")
def hostile(run):
    """Markup of every kind in the names of run, columns, groups and labels, and in texts."""
    log, examples = run
    names = np.array(HOSTILE, dtype=object)
    rows = np.arange(len(examples.frame))
    column = "<b>*col*</b>|[x]"
    frame = examples.frame.assign(**{column: names[rows % len(names)], "label": names[rows % 2]})
    audit = summary_of(log, ExampleTable(frame), by=[column], fidelity={})
    text = " ".join(HOSTILE)
    content = audit.to_json()
    checks = [one | {"detail": text, "title": text} for one in content["checks"]]
    lines = [one | {"detail": text, "advice": text} for one in content["guarantee"]["lines"]]
    reasons = {"lines": lines, "reasons": [text], "status": "declared", "evidence": text}
    return with_content(
        attacked(audit),
        name="[bold]x[/bold] " + HOSTILE[5],
        checks=checks,
        missing=[text],
        guarantee=reasons,
        claim_reason=text,
        command=text,
        attribute_attacks=[one | {"attribute": text} for one in attributes(above=True)],
        views=[one | {"reason": text} for one in VIEWS],
        account={"unit": "<i>p</i>*q*", "rows_per_unit": 2},
    )


def with_content(audit, **changes):
    """The audit with other content of audit.json; dicts change some keys of a dict."""
    content = audit.to_json()
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(content[key], dict)
        content[key] = {**content[key], **value} if both else value
    return Audit.from_json(content)


def attacked(audit, *, above=True, strong=True):
    """Attacks with reference models, on groups, units, updates and the baseline."""
    member = np.arange(400) < 200
    score = member * 1.0 if strong else np.sin(np.arange(400) * 7.0)
    found = AttackScores(score, member, "x")
    tables, tried = [], []
    for name, model, n in (("lira", "dp", 16), ("rmia", "dp", 0), ("lira", "non_dp", 16)):
        tables.append(rates_of(found, attack=name, model=model, tests=3))
        row = {"attack": name, "title": f"{name} (online)", "model": model, "references": n}
        row |= {"adversary": "final_model", "sees": "losses", "source": "a paper", "caveat": "see"}
        tried.append(row | {"n_members": 200, "n_others": 200, "above_worst_case": above})
    first = tables[0][tables[0]["part"] == ALL]
    parts = [("", "mean"), ("", UPDATES), ("sex", "Male")]
    tables += [first.assign(by=by, part=part) for by, part in parts]
    accused = first[first["rate"] == "tpr_0.01"].assign(by="sex", part="Male")
    tables += [accused.assign(rate=rate) for rate in ("accused", "falsely_accused")]
    rows = [row for table in tables for row in table.to_dict("records")]
    content = audit.to_json()
    of_loss = [row for row in content["rates"] if row["rate"] != "auc" or row["model"] == "dp"]
    return with_content(
        audit,
        attacks=tried + content["attacks"],
        rates=[
            {k: None if v != v else v for k, v in row.items()}
            for row in rows  # NaN is null
        ]
        + of_loss,
        ceilings={
            "worst_case": {"0.01": 0.066, "0.001": 0.0067},
            "common_threshold": {"0.01": 0.04, "0.001": 0.004},
            "advantage": 0.5,
        },
        unchecked=["Whether the references saw other data is not known."],
        vulnerability=[ranked_by(0.1, model="dp"), ranked_by(None, model="non_dp")],
    )


def ranked_by(given, **more):
    """How well epsilon tells who is vulnerable; a partial correlation where loss is known too."""
    row = {"figure": "epsilon", "correlation": 0.2, "found": 0.5, "given_other": given, **more}
    ends = {f"{key}_interval": interval(0.1, 0.3) for key in ("correlation", "found")}
    return row | ends | {"given_other_interval": None if given is None else interval(0.0, 0.2)}


def attributes(above):
    row = {
        "by": "",
        "name": "all",
        "n_members": 240,
        "n_others": 120,
        "imputed": 0.5,
        "guessed": 0.61,
    }
    row |= {"others_imputed": 0.5, "others_guessed": 0.52, "advantage": 0.09}
    row |= {"low": -0.02, "high": 0.2, "individual_ceiling": 0.3, "above_ceiling": above}
    row |= {"attribute": "sex", "n_values": 2, "guesser": "with_imputation", "title": "an attack"}
    row |= {"model": "dp", "ceiling": 0.4}
    parts = [{"by": "label", "name": "1"}, {"by": "individual epsilon", "name": "0 to 1"}]
    others = [{"model": "non_dp"}, {"guesser": "without_imputation"}]
    return [row, *(row | part for part in parts), *(row | {"ceiling": None} | of for of in others)]


def gradient_canaries(agree):
    keys = ("steinke2023", "mahloujifar2024", "rates", "means")
    bound = {"epsilon": 1.2, "ceiling": 1.9, "confidence": 0.95, "tried": 3}
    bound |= {"guesses": 0, "correct": 0}
    bound |= {"false_alarm_rate": 0.02, "false_alarm_interval": interval(0.0, 0.05)}
    one = {"length": 1.0, "n_members": 500, "n_others": 500, "ceiling": 1.9, "separation": 2.0}
    one |= {"separation_interval": interval(1.9, 2.1), "separation_predicted": 2.0}
    one |= {"bounds": dict.fromkeys(keys, bound)}
    lengths = [one | {"p_value": 0.5 if agree else 1e-6, "agrees": agree}]
    return {"delta": 1e-5, "lengths": lengths, "left_out": ["Length 0.1: too few canaries."]}


UNITS = [
    {"least": 1, "most": 1, "n_units": 40, "median": 1.0, "max": 1.2, "worst_case_epsilon": 1.4,
     "rows_dropped": 20, "n_rows": 100},
    {"least": 2, "most": 3, "n_units": 0, "median": None, "max": None, "worst_case_epsilon": 1.9,
     "rows_dropped": 0, "n_rows": 100},
]  # fmt: skip
VIEWS = [
    {"unit": "client", "observer": "outsider", "noise_multiplier": 1.1, "participation": "secret",
     "worst_case_epsilon": 1.9, "median_epsilon": 1.0, "reason": ""},
    {"unit": "row", "observer": "update", "noise_multiplier": None, "participation": "known",
     "worst_case_epsilon": None, "median_epsilon": None, "reason": "no noise is added here"},
    {"unit": "row", "observer": "gradient", "noise_multiplier": None, "participation": "known",
     "worst_case_epsilon": None, "median_epsilon": None, "reason": "nor here"},
]  # fmt: skip
SENSITIVITY = {
    "choice": "between_records", "here": "last", "instead": "worst_case", "n": 240, "pearson": 1.0,
    "mean_shift": 0.0123, "p95_absolute": 0.02, "largest_absolute": 0.03, "share_smaller": 0.25,
}  # fmt: skip
FEWER = SENSITIVITY | {"choice": "records", "here": "30", "instead": "15"}
BATCH_NORMS = {
    "between_records": "last", "n_entries": 1_234, "signed_bias": 0.01, "mean_absolute": 0.02,
    "p95_absolute": 0.03, "largest_absolute": 0.04, "share_under": 0.1,
    "share_under_1_percent": 0.05, "order": 12.0, "mean_rdp": 0.5, "rdp_bias": 0.01,
    "rdp_bias_error": 0.001, "unbiased_mean_rdp": 0.49, "standard_error": 0.01,
}  # fmt: skip
EXACTNESS = Exactness(
    1_000_000,
    2**-10,
    related=1_000_000,
    attacked_members=1_000_000,
    attacked_nonmembers=None,
    compared=20_000,
)


def moved(audit, epsilon=(0.0, 2.0)):
    """Settings that move, with a curve of test accuracy."""
    curve = {"steps": [0, 10], "test_accuracy": [0.1, 0.9], "epsilon": epsilon}
    moves = {"steps": [0, 1], "max_grad_norm": [4.0, 2.0], "noise_multiplier": [1.0, 1.0]}
    schedule = {**moves, "noise_std": [4.0, 2.0], "curve": curve}
    return with_content(audit, schedule=schedule, groups=[])


def odd_groups(audit):
    """Reversals of both kinds, ranks, notes, classes, losses left out, labels that lack."""
    found = next(one for one in audit.to_json()["groups"] if one["by"] == "sex")
    more = {"true_positive_rate": 0.8, "false_positive_rate": 0.1}
    more |= {"losses_left_out": 3, "lacks_labels": ["1"]}
    rows = [row | more for row in found["rows"]]
    chance, sure = {"label": "0", "p_value": 0.4}, {"label": "1", "p_value": 0.001}
    found |= {"rows": rows, "reversals": [chance, sure]}
    found |= {"accuracy_rank": {"value": -0.5, "n_groups": 5, "p_value": 0.2}}
    found |= {"notes": ["A unit whose rows differ is in its group (missing)"]}
    undefined = found["ratio"] | {"value": None, "interval": None, "reason": "a mean of 0"}
    odd = [
        found,
        found | {"by": "of one class", "positive_class": "1"},
        found | {"by": "of many classes", "positive_class": None},
        found | {"by": "alone", "ratio": None, "within_label": []},
        found | {"by": "undefined", "ratio": undefined},
        found | {"by": "uncertain", "ratio": found["ratio"] | {"interval": None}},
        found | {"by": "plain", "reversals": [chance], "standardised_ratio": None},
    ]
    return with_content(audit, groups=odd + [found | {"by": f"more {k}"} for k in range(3)])


@pytest.fixture(scope="session")
def audits(run, summary):
    """Audits by name."""
    return audits_of(run, summary)


def audits_of(run, summary):
    log, examples = run
    short = {"by": ["sex"], "fidelity": {}}
    policy = RecordingPolicy(every=1, reference_examples=0).to_dict()

    base = summary_of(*run, **short)
    same = ("groups", "loss", "individual", "attacks", "rates", "roc", "attack_by_epsilon")
    known = {key: getattr(base, key) for key in (*same, "most_exposed", "tightness", "drivers")}

    def made(**evidence):
        """With other checks and recorders, on which what takes long does not depend."""
        return summary_of(*run, evidence=evidence, by=["sex"], fidelity=known)

    member = np.arange(400) % 2 == 0
    coins = AttackScores(member.astype(float), member, "canaries", fair_coins=True)
    blind = AttackScores(np.zeros(400), member, "canaries", fair_coins=True)
    few_coins = np.arange(6.0), np.arange(6) < 3
    holdout = epsilon_table(np.linspace(0.1, 1.9, len(examples.test)), worst_case=1.9)
    leaky = examples.frame.assign(loss=np.where(examples.frame["split"] == "train", 0.001, 2.0))
    few = ExampleTable(
        examples.frame.assign(group=np.where(np.arange(len(examples.frame)) < 3, "few", "many"))
    )
    street = [f"street {k % 60}" for k in range(len(examples.frame))]
    streets = ExampleTable(examples.frame.assign(street=street))
    one = ExampleTable(examples.frame[examples.frame["example_id"] == 0].assign(loss=0.0))
    huge = {"worst_case_epsilon": 143.2, "membership": None}
    guarantee = {"neighbouring": "zero_out", "unit": "user", "rows_per_unit": 3}
    found = reconstruction_of(scores(np.arange(200) < 60, 1.0), np.linspace(1, 2, 200))
    fine = reconstruction_of(scores(np.arange(200) < 4, 1.0))
    group = {"by": "sex", "name": "Male", "n": 9, "too_small": True, "mean_exact": 1.0}
    group |= {"signed_bias": 0.1, "mean_absolute": 0.1, "largest_absolute": 0.2}
    fidelity = summary.to_json()["fidelity"]
    own = fidelity[0] | {"groups": 61 * [group | {"share_under_1_percent": 0.5}]}
    own["is_this_log"] = True
    bare = {"examples": None, "non_dp": None, "checks": ()}
    by_epsilon = summary_of(log, ExampleTable(leaky), holdout=holdout, **short)
    alarms = by_epsilon.to_json()["attack_by_epsilon"]
    for row in alarms:
        row |= {"above_worst_case": False, "above_reference": True}
    units = with_content(attacked(summary, above=False), unit_sizes=UNITS, account=guarantee)
    estimate = {"claim": "estimate", "claim_reason": "Only 3 of 30 steps were recorded."}
    return {
        "plain": summary,
        "void": made(recorder={"seeded": True}),
        "no noise": made(recorder={"no_privacy": "no noise"}),
        "unproven": made(checks=(*CHECKS, failed("batch_sizes", "too many"))),
        "declared": made(checks=()),
        "own loader": made(
            checks=(
                *CHECKS,
                failed(
                    "batch_for_every_step",
                    "8 of 8 steps used no batch of their own from the attached loader",
                ),
            )
        ),
        "guessed": made(checks=(*CHECKS, failed("seeds", "torch.manual_seed(0)"))),
        "system": made(checks=(*CHECKS, OF_CHECKS["seeds"].fact("not checked", "the system's"))),
        "partly": made(checks=sound_checks(replay="not checked")),
        "delta": with_content(summary, guarantee={"delta": 0.01, "delta_times_n": 2.4}),
        "huge": with_content(summary, guarantee=huge),
        "older": with_content(
            summary, guarantee={"lines": [], "status": "declared", "reasons": [NOT_COMPARED]}
        ),
        "bare": summary_of(*run, evidence=bare, fidelity={}),
        "one": summary_of(log.take([0]), one, by=[], evidence={"non_dp": one}, fidelity={}),
        "few": summary_of(log, few, by=["group"], fidelity={}),
        "streets": summary_of(log, streets, by=["street"], fidelity={}),
        "holdout": summary_of(*run, holdout=holdout, **short),
        "leaky": summary_of(log, ExampleTable(leaky), holdout=holdout, **short),
        "look": with_content(by_epsilon, attack_by_epsilon=alarms),
        "canaries": made(canaries=blind),
        "proven": made(canaries=coins),
        "few canaries": made(canaries=AttackScores(*few_coins, "canaries", fair_coins=True)),
        "canaries alone": summary_of(*run, evidence=bare | {"canaries": coins}, fidelity={}),
        "attacked": attacked(summary),
        "failed attack": attacked(summary, above=False, strong=False),
        "units": units,
        "groups": odd_groups(summary),
        "moved": moved(summary),
        "void curve": moved(summary, epsilon=[]),
        "exactness": summary.replace(exactness=EXACTNESS),
        "tight beside": summary.replace(tightness=Tightness(2.5, 200, 0.5, 0.6)),
        "tight": summary.replace(
            account=replace(summary.account, accountant="pld"),
            tightness=Tightness(2.5, 200, 0.5, 0.5, n_bracketed=8, above=0.004),
        ),
        "estimate": with_content(summary, **estimate, fidelity=[own]),
        "fewer records": with_content(summary, **estimate, fidelity=[], sensitivity=[FEWER]),
        "unknown": with_content(summary, **estimate, fidelity=[]),
        "federated": with_content(summary, views=VIEWS, sensitivity=[SENSITIVITY]),
        "batch norms": with_content(summary, batch_norms=BATCH_NORMS, fidelity=[]),
        "attributes": with_content(summary, attribute_attacks=attributes(above=False)),
        "guessed attributes": with_content(summary, attribute_attacks=attributes(above=True)),
        "gradient canaries": with_content(summary, gradient_canaries=gradient_canaries(True)),
        "contradicted": with_content(summary, gradient_canaries=gradient_canaries(False)),
        "read": summary.replace(
            reconstruction=(replace(found, step=5), replace(fine, step=10, error=None))
        ),
        "origin": made(checks=(*CHECKS, OF_CHECKS["journal"].fact("passed", "as sealed"))),
        "no reason": with_content(summary, guarantee={"status": "declared"}),
        "two reasons": with_content(
            summary, guarantee={"status": "unproven", "reasons": ["one", "two"]}
        ),
        "known": with_content(
            summary,
            account={"participation": "known"},
            individual={"wide": 3},
            loss={
                "floored": 2,
                "left_out": 3,
                "pearson_log_loss": -0.5,
                "spearman": None,
                "pearson_with_floor": 0.1,
            },
        ),
        "rounds": made(
            recorder={"rounds": True, "policy": policy, "pass_seconds": 1.0},
            declared=Declared({"name": "tiny", "released": "every checkpoint"}),
        ),
        "all": with_content(units, views=VIEWS, **estimate, batch_norms=BATCH_NORMS),
    }
