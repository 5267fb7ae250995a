"""An audit with signals of reference models."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from command_lines import run as run_command
from indpriv._columns import to_floats
from indpriv._files import read_json, read_parquet, write_json
from indpriv._formatting import capitalised
from indpriv.analysis.attacks.membership import scored_attacks
from indpriv.analysis.attacks.rates import ALL
from indpriv.analysis.recorded_run import RecordedRun, read_references
from indpriv.analysis.summary import attacks_on
from indpriv.attack_scores import RUNGS, AttackScores
from indpriv.attack_signals import AttackSignals, from_losses
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.references import rmia as rmia_of
from indpriv.audit import audit
from indpriv.audit.attacks import (
    attack_study,
    guarantee_of_run,
    known_of_run,
    results_of_run,
)
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import parts, signals_with_effect, write_run


@pytest.fixture
def signals(artifacts):
    """Four references for the small run, on which being trained on raises the confidence."""
    rng = np.random.default_rng(0)
    _, examples = artifacts
    train, test = examples.train, examples.test
    own = from_losses(np.concatenate([to_floats(part["loss"]) for part in (train, test)]))
    member = np.concatenate([[np.arange(len(own)) < len(train)], rng.random((4, len(own))) < 0.6])
    others = own + rng.normal(0, 0.2, (4, len(own))) + member[1:] * 0.1
    return AttackSignals.from_arrays(
        np.concatenate([[own], others]),
        member,
        np.concatenate([train["example_id"], test["example_id"]]),
        audited=0,
        coins=True,
        share=0.6,
        fingerprint="of the data",
    )


SEEN = ("labels", "losses", "references")


@pytest.mark.usefixtures("no_extras")
def test_the_audit_runs_every_attack_whose_needs_are_met(run_dir, signals, tmp_path):
    signals.save(tmp_path / "signals")
    few = AttackSignals(
        signals.signal[:2], signals.member[:2], signals.example_ids, audited=0, share=0.6
    )
    few.save(tmp_path / "baseline")
    summary = audit(
        run_dir,
        tmp_path / "audit",
        signals=tmp_path / "signals",
        baseline_signals=tmp_path / "baseline",
    )
    attacks = summary
    ours, baseline = attacks_on(attacks, "dp"), attacks_on(attacks, "non_dp")
    assert {"rmia", "lira", "loss_threshold", "quantile"} <= {found.attack for found in ours}
    names = {found.attack for found in baseline}
    assert "rmia" in names
    assert "lira" not in names  # it needs four references, and there is one
    assert not {found.attack for found in ours} & {"label_rmia", "trajectory_rmia"}
    rates = {found.attack: parts(attacks.rates, attack=found.attack, model="dp") for found in ours}
    aucs = [of[ALL]["auc"].value for of in rates.values()]
    assert aucs == sorted(aucs, reverse=True)
    for row in (rates["rmia"][ALL][name] for name in ("auc", "tpr_0.01")):
        assert row.joint_low <= row.low < row.high < row.joint_high
    rmia = next(found for found in ours if found.attack == "rmia")
    assert (rmia.references, rmia.n_members, rmia.n_others) == (4, 240, 120)
    ceilings = attacks.ceilings
    assert 0.01 < ceilings.common_threshold["0.01"] <= ceilings.worst_case["0.01"] < 1
    rows = read_parquet(tmp_path / "audit" / "attacks.parquet")
    assert (len(rows), int(rows["member"].sum())) == (360, 240)
    assert (tmp_path / "audit" / "attacks.parquet").stat().st_mode & 0o777 == 0o600
    train = rows[rows["member"]].set_index("example_id")
    table = EpsilonTable.open(tmp_path / "audit" / "epsilon.parquet").table()
    assert np.array_equal(train.loc[table.example_ids, "epsilon"], table.epsilon)
    assert rows.loc[~rows["member"], ["epsilon", "ceiling_at_1_percent"]].isna().all(axis=None)
    assert 0.01 < rows["ceiling_at_1_percent"].max() <= ceilings.worst_case["0.01"]
    direct = rmia_of(signals, 0)
    assert rows["rmia"].to_numpy() == pytest.approx(direct.scores)
    assert rows["loss_threshold"].to_numpy() == pytest.approx(-rows["loss"].to_numpy())
    page = (tmp_path / "audit" / "audit.md").read_text()
    assert "RMIA, offline" in page
    by_sex = attacks.rates.query("by == 'sex' and rate == 'falsely_accused'")
    assert by_sex["attack"].unique().tolist() == [ours[0].attack]
    assert by_sex["n"].sum() == ours[0].n_others
    assert (by_sex["value"] * by_sex["n"]).sum() <= 0.01 * ours[0].n_others
    assert attacks.attack_by_epsilon.empty  # nobody knows the epsilons of the test examples
    ladder = page[page.index("The ladder") :]
    order = [ladder.index(capitalised(title)) for key, title in RUNGS.items() if key in SEEN]
    assert order == sorted(order)
    assert "An attack that fails is no evidence of privacy" in ladder
    assert "attack=GradientCanaries(1000)" in ladder.replace("\\", "")
    assert [text for text in attacks.unchecked if text in page]
    assert "Ceiling at these norms" in page
    assert f"--signals {tmp_path / 'signals'}" in page.replace("\\", "")


@pytest.mark.usefixtures("no_extras")
def test_the_strongest_attack_is_judged_by_the_epsilons_of_both_sides(artifacts, signals, tmp_path):
    log, examples = artifacts
    run = write_run(tmp_path / "run", log, examples)
    write_run(run / "holdout", log.take(range(len(examples.test))), None)
    signals.save(tmp_path / "signals")
    found = audit(run, tmp_path / "audit", delta=1e-5, signals=tmp_path / "signals")
    attacks = found
    by_epsilon, best = attacks.attack_by_epsilon, attacks_on(attacks, "dp")[0]
    assert by_epsilon["attack"].unique().tolist() == [best.title]
    assert best.references == 4
    for _, part in by_epsilon.groupby("target_fpr"):
        assert part["n_members"].sum() == best.n_members
        assert part["n_others"].sum() == best.n_others - best.n_others // 2


@pytest.mark.usefixtures("no_extras")
def test_an_audit_scores_each_attack_once(run_dir, signals, tmp_path, monkeypatch):
    signals.save(tmp_path / "signals")
    calls, rmia = [], ATTACKS["rmia"]

    def counted(*known):
        calls.append(known)
        return rmia.attack(*known)

    monkeypatch.setitem(ATTACKS, "counted", replace(rmia, name="counted", attack=counted))
    audit(run_dir, tmp_path / "audit", signals=tmp_path / "signals")
    assert len(calls) == 1
    assert "counted" in read_parquet(tmp_path / "audit" / "attacks.parquet")


@pytest.mark.usefixtures("no_extras")
def test_signals_of_something_else_are_refused(run_dir, signals, tmp_path):
    def message(other):
        shutil.rmtree(tmp_path / "signals", ignore_errors=True)
        other.save(tmp_path / "signals")
        with pytest.raises(InputError) as error:
            audit(run_dir, tmp_path / "audit", signals=tmp_path / "signals")
        return str(error.value)

    record = read_json(run_dir / "run.json")
    write_json(run_dir / "run.json", {**record, "data": {**record["data"], "fingerprint": "of it"}})
    try:
        assert "another fingerprint" in message(signals)
    finally:
        write_json(run_dir / "run.json", record)
    assert "holds a study" in message(replace(signals, audited=None, example_ids=np.arange(360)))
    ids = signals.example_ids.copy()
    ids[0] = 10_000
    assert "holds examples that" in message(replace(signals, example_ids=ids))
    moved = np.array(signals.signal)
    moved[0] += 1
    assert "is not the model of" in message(replace(signals, signal=moved))
    same = np.array(signals.member)
    same[1] = same[0]
    assert "was trained on the same examples" in message(replace(signals, member=same))


@pytest.mark.parametrize("side", [True, False])
def test_signals_that_say_nothing_about_the_run_are_refused(run_dir, signals, tmp_path, side):
    silent = np.array(signals.signal)
    silent[0, signals.member[0] == side] = np.nan
    replace(signals, signal=silent).save(tmp_path / "signals")
    with pytest.raises(InputError, match="no confidence that can be compared"):
        audit(run_dir, tmp_path / "audit", signals=tmp_path / "signals")


def test_a_fingerprint_that_is_missing_is_said_to_be_unchecked(run_dir, signals, tmp_path):
    def unchecked(signals):
        shutil.rmtree(tmp_path / "signals", ignore_errors=True)
        signals.save(tmp_path / "signals")
        return read_references(tmp_path / "signals", run_dir, table)[1]

    table = ExampleTable.from_parquet(run_dir / "examples.parquet")
    record = read_json(run_dir / "run.json")
    try:
        write_json(run_dir / "run.json", {**record, "data": {"fingerprint": "of the data"}})
        assert unchecked(signals) == ()
        (text,) = unchecked(replace(signals, fingerprint=""))
        assert text.startswith("No fingerprint of the data is in the file of the signals")
        write_json(run_dir / "run.json", {**record, "data": {}})
        (text,) = unchecked(signals)
        assert text.startswith("No fingerprint of the data is in run.json")
    finally:
        write_json(run_dir / "run.json", record)


def test_attacks_that_signals_of_another_kind_cannot_serve_are_left_out(run_dir, signals, tmp_path):
    replace(signals, kind="other").save(tmp_path / "signals")
    table = ExampleTable.from_parquet(run_dir / "examples.parquet")
    read, unchecked = read_references(tmp_path / "signals", run_dir, table)
    names = {found.attack.name for found in scored_attacks(RecordedRun(Material(table, **read)))}
    assert {"lira", "calibrated"} <= names
    assert not {"rmia", "rmia_offline"} & names
    assert "are no confidences" in " ".join(unchecked)


def test_a_run_is_attacked_without_an_audit(run_dir, signals, tmp_path):
    signals.save(tmp_path / "signals")
    record = read_json(run_dir / "run.json")

    def attacked(run_dir, names):
        known = known_of_run(run_dir, tmp_path / "signals")
        return results_of_run(known, names, guarantee_of_run(run_dir))

    try:
        less = {key: record[key] for key in record if key not in ("guarantee", "delta")}
        write_json(run_dir / "run.json", {**less, "delta": 1e-5})  # as of a loop of one's own
        own = attacked(run_dir, ("rmia", "calibrated"))
        guarantee = {"epsilon": 1.9, "delta": 1e-5}
        write_json(run_dir / "run.json", {**record, "guarantee": guarantee})
        found = attacked(run_dir, ("rmia", "calibrated"))
        assert set(found.attacks["attack"]) == {"rmia", "calibrated"}
        assert own.attacks["attack"].tolist() == found.attacks["attack"].tolist()
        with pytest.raises(
            InputError, match="label_rmia needs the signal 'labels' of the audited model"
        ):
            attacked(run_dir, ("label_rmia",))
        with pytest.raises(InputError, match="attack='rmai' is not known"):
            attacked(run_dir, ("rmai",))
    finally:
        write_json(run_dir / "run.json", record)


def test_every_model_of_a_study_is_attacked_with_the_others_as_references(
    audited, tmp_path, capsys
):
    folder, _ = audited
    study = signals_with_effect(1.0, 9, 240)
    found = attack_study({"confidence": study})
    assert set(found["n"]) == {9}
    auc = found[found["rate"] == "auc"].set_index("attack")["value"]
    assert auc.is_monotonic_decreasing
    assert {"RMIA", "loss threshold"} <= set(auc.index)
    assert set(attack_study({"confidence": study}, ("rmia",))["attack"]) == {"RMIA"}
    # Of references for a run, the run is left out: no coins decided on its examples.
    rest = replace(study, signal=study.signal[1:], member=study.member[1:])
    others = attack_study({"confidence": replace(study, audited=0)})
    assert others.equals(attack_study({"confidence": rest}))
    alone = replace(study, signal=study.signal[:1], member=study.member[:1], audited=0)
    with pytest.raises(InputError, match="number of reference models is 0"):
        attack_study({"confidence": alone})
    study.save(tmp_path / "study")
    (tmp_path / "audit.toml").write_text(AUDIT)
    command = ["audits", "attack", str(tmp_path / "audit.toml"), "--attack", "rmia"]
    command += ["--signals", str(tmp_path / "study"), "--epsilon", str(folder)]
    assert run_command(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Means over models" in shown
    assert "no trend over epsilon" in shown
    assert run_command([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert run_command(["attack", str(tmp_path / "study"), "--attack", "rmia", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"] == printed["rates"]
    assert (printed["rates"][0]["rate"], printed["rates"][0]["value"]) == ("auc", auc["RMIA"])
    assert len(printed["effects"]["bins"]) > 1
    assert run_command(["attack"]) == 2


AUDIT = """
name = "small"
[data]
dataset = "digits"
[model]
architecture = "mlp"
[training]
epochs = 1
batch_size = 256
learning_rate = 0.5
max_grad_norm = 1.0
delta = 1e-5
target_epsilon = 8.0
[recording]
every = 1
[checkpoints]
every = "epoch"
[attacks]
references = 8
"""


def test_a_run_without_test_examples_says_what_attacks_lack_and_what_canaries_prove(
    artifacts, tmp_path, capsys
):
    log, examples = artifacts
    run = write_run(tmp_path / "run", log, ExampleTable(examples.train))
    member = np.random.default_rng(0).random(200) < 0.5
    scores = AttackScores(member + np.linspace(0, 0.1, 200), member, "canaries", fair_coins=True)
    scores.to_parquet(run / "canaries.parquet")
    assert run_command(["attack", str(run), "--set", "delta=1e-5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No attack was run; it needs losses of training and test examples" in shown
    assert "Every attack" not in shown
    assert run_command(["audit", str(run), "--delta", "1e-5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Attack canaries prove an epsilon of at least \d\.\d+", shown)
