import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest

import indpriv.release
from indpriv._files import read_json
from indpriv.cli import run as run_command
from indpriv.errors import EvidenceError, InputError, PrivacyWarning
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import FULL_PRECISION
from indpriv.release import Budget, Request, mechanisms, publish, release
from indpriv.release.ledger import Ledger
from indpriv.release.publish import read_release, render_model_card
from indpriv.release.sources import _norm_grid
from processes import running
from synthetic import small_run, write_run

from .conftest import WORST, epsilons, read_epsilons, write_small_audit

SCHEMA = json.loads(
    (Path(indpriv.release.__file__).parent / "release.schema.json").read_text(encoding="utf-8")
)
MEDIAN = Request((0.5,), epsilon=0.1)
GROUPS = {"by": "sex", "groups": ("Male", "Female", "Nobody")}
REQUESTS = {
    "default": Request(epsilon=0.5),
    "mean": Request(mean=True, epsilon=0.5),
    "mean alone": Request((), mean=True, epsilon=0.5),
    "distribution": Request(
        tuple(np.arange(1, 100) / 100), mean=True, epsilon=0.5, method="histogram"
    ),
    "descent": Request(mean=True, epsilon=0.5, delta=1e-6, method="descent"),
    "groups": Request((0.5,), epsilon=0.5, **GROUPS),
    "means of groups": Request((0.5,), mean=True, epsilon=0.5, **GROUPS),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_answered_as_the_schema_says(audit_dir, name):
    request = REQUESTS[name]
    published = release(audit_dir, request, empty_groups=True)
    content = json.loads((audit_dir / "shareable" / "release.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(content, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert published.fresh
    assert content == published.content
    assert read_release(audit_dir) == content
    assert content["quantity"] in render_model_card(read_json(audit_dir / "audit.json"), content)
    for figures in (content["groups"] or {"": content}).values():
        values = [figures["quantiles"][f"{quantile:g}"] for quantile in request.quantiles]
        assert values == sorted(values)
        assert all(0 < value <= WORST for value in values)
    assert sorted(path.name for path in (audit_dir / "shareable").iterdir()) == [
        "release.html",
        "release.json",
    ]
    if request.method == "exponential":
        assert content["spent"]["with_training"] == {"epsilon": 2.5, "delta": 1e-5}


def test_with_much_budget_figures_are_those_of_the_data(audit_dir):
    values = read_epsilons(audit_dir)
    content = release(audit_dir, Request(mean=True, epsilon=6000.0)).content
    for name, value in content["quantiles"].items():
        assert value == pytest.approx(np.quantile(values, float(name)), abs=0.02)
    assert content["mean"] == pytest.approx(values.mean(), abs=WORST / 4000)
    assert content["count"] == len(values)
    request = Request((0.5,), mean=True, epsilon=6000.0, **GROUPS)
    by_sex = release(audit_dir, request, empty_groups=True).content["groups"]
    sex = pd.read_parquet(audit_dir / "epsilon.parquet")["sex"]
    for name in ("Male", "Female"):
        assert by_sex[name]["quantiles"]["0.5"] == pytest.approx(
            np.median(values[sex == name]), abs=0.02
        )
        assert by_sex[name]["count"] == (sex == name).sum()
    assert by_sex["Nobody"]["count"] == 0
    assert by_sex["Nobody"]["mean"] is None


def test_nothing_that_is_written_derives_from_raw_values_but_through_a_mechanism(
    tmp_path, monkeypatch
):
    """With mechanisms that answer blindly, two audits of other people, of another number, write the same files."""
    monkeypatch.setattr(mechanisms, "select_quantile", lambda *_: 1234)
    monkeypatch.setattr(mechanisms, "noisy_sums", lambda *_: (900_000, 1_100_000))
    monkeypatch.setattr(mechanisms, "noisy_count", lambda *_: 321)
    written = []
    for name, values in (("few", epsilons(11)), ("many", np.full(240, 0.3))):
        (tmp_path / name).mkdir()
        folder = write_small_audit(tmp_path / name / "audit", values)
        for request in (Request(mean=True, epsilon=0.5), Request((0.5,), epsilon=0.5, **GROUPS)):
            release(folder, request, empty_groups=True)
            written.append([path.read_bytes() for path in sorted((folder / "shareable").iterdir())])
    assert written[0] == written[2]
    assert written[1] == written[3]


FEW = [
    [0.7],
    *(pytest.param(v, marks=pytest.mark.slow) for v in ([0.7, 2.0], [0.5] * 10, [2.0] * 10)),
]


@pytest.mark.parametrize("values", [*FEW, [0.0] * 10], ids=str)
def test_few_people_or_equal_ones_are_answered(tmp_path, values):
    folder = write_small_audit(tmp_path / "audit", values)
    with_one = release(folder, Request(mean=True, epsilon=0.5)).content
    assert all(0 < value <= WORST for value in with_one["quantiles"].values())


def test_the_same_request_gives_the_stored_answer_until_told_to_spend(audit_dir):
    first = release(audit_dir, MEDIAN)
    other = release(audit_dir, Request((0.9,), epsilon=0.1))
    again = release(audit_dir, MEDIAN)
    assert first.fresh
    assert not again.fresh
    assert again.content["quantiles"] == first.content["quantiles"]
    assert again.content["spent"]["epsilon"] == other.content["spent"]["epsilon"] == 0.2
    assert json.loads((audit_dir / "shareable" / "release.json").read_text()) == again.content
    spent = release(audit_dir, MEDIAN, spend=True)
    assert spent.fresh
    assert spent.content["spent"]["releases"] == 3


def test_a_budget_is_enforced_and_set_once(audit_dir):
    limit = Budget.of(0.3, 0.0)
    release(audit_dir, MEDIAN, budget=limit)
    for quantile in (0.2, 0.3):
        release(audit_dir, Request((quantile,), epsilon=0.1))
    before = tree(audit_dir)
    with pytest.raises(
        InputError, match=r"budget of this audit is \(epsilon 0\.30, delta 0\); .* refused"
    ):
        release(audit_dir, Request((0.4,), epsilon=1e-6))
    assert tree(audit_dir) == before  # nothing half-written
    assert not release(audit_dir, MEDIAN).fresh
    with pytest.raises(InputError, match="a budget is set once"):
        release(audit_dir, MEDIAN, budget=Budget.of(1.0, 0.0))
    release(audit_dir, MEDIAN, budget=limit)


def test_a_budget_without_delta_pays_for_no_descent(audit_dir):
    with pytest.raises(InputError, match="refused"):
        release(audit_dir, REQUESTS["descent"], budget=Budget.of(5.0, 0.0))


def test_a_budget_below_what_is_spent(audit_dir):
    release(audit_dir, MEDIAN)
    with pytest.raises(InputError, match="is spent already"):
        release(audit_dir, MEDIAN, budget=Budget.of(0.05, 0.0))


def test_a_draw_that_is_interrupted_spends_and_shows_nothing(audit_dir, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publish, "draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release(audit_dir, MEDIAN)
    assert not (audit_dir / "shareable").exists()
    assert release(audit_dir, MEDIAN).content["spent"]["releases"] == 1


def test_what_was_paid_for_is_shown_even_if_writing_it_failed(audit_dir, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(publish, "write_json", full)
        with pytest.raises(OSError, match="no space"):
            release(audit_dir, MEDIAN)
    again = release(audit_dir, MEDIAN)
    assert not again.fresh
    assert again.content["spent"]["releases"] == 1


@pytest.mark.slow
def test_two_processes_cannot_both_spend(audit_dir):
    code = (
        "import sys; from indpriv.release import Request, parse_budget, release\n"
        "release(sys.argv[1], Request((0.5,), epsilon=0.1), budget=parse_budget('0.1'), spend=True)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(audit_dir)]
    options = {"stderr": subprocess.PIPE, "text": True}
    with running(command, **options) as one, running(command, **options) as other:
        both = (one, other)
        errors = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert "InputError" in "".join(errors)
    assert release(audit_dir, MEDIAN).content["spent"]["releases"] == 1


def test_while_another_release_is_drawn_this_one_is_refused(audit_dir):
    fingerprint = "f"
    busy = pytest.raises(InputError, match=f"process {os.getpid()}")
    with closing(Ledger(audit_dir, fingerprint)), busy:
        release(audit_dir, MEDIAN)


def test_a_changed_ledger_is_refused(audit_dir):
    release(audit_dir, MEDIAN)
    journal = audit_dir / "ledger" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"epsilon":0.1', '"epsilon":0.0'))
    with pytest.raises(EvidenceError, match="was changed"):
        release(audit_dir, MEDIAN)


def test_a_directory_that_was_audited_again_is_refused(audit_dir):
    release(audit_dir, MEDIAN)
    frame = pd.read_parquet(audit_dir / "epsilon.parquet")
    facts = frame.attrs  # which an old pandas forgets
    frame["epsilon"] *= 0.5
    frame.attrs = facts
    frame.to_parquet(audit_dir / "epsilon.parquet")
    with pytest.raises(InputError, match="audited again"):
        release(audit_dir, MEDIAN)


def test_files_are_their_owners(audit_dir):
    release(audit_dir, MEDIAN)
    for path in [*(audit_dir / "ledger").iterdir(), *(audit_dir / "shareable").iterdir()]:
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_list_of_groups_is_not_held_against_the_data(audit_dir):
    """A group that nobody is in looks like any other, and one that is not listed is not missed."""
    request = Request((0.5,), epsilon=0.1, by="sex", groups=("Nobody", "Male"))
    content = release(audit_dir, request, empty_groups=True).content
    assert list(content["groups"]) == ["Nobody", "Male"]
    shapes = [
        {name: type(value) for name, value in figures.items()}
        for figures in content["groups"].values()
    ]
    assert shapes[0] == shapes[1]


def test_a_typo_in_a_group_spends_nothing(audit_dir, capsys):
    command = f"publish quantiles {audit_dir} --quantiles 0.5 --epsilon 0.1 --by sex --group Mail"
    assert run_command(command.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "nobody is in group 'Mail' of sex, so nothing was drawn or spent" in said
    assert not (audit_dir / "shareable").exists()
    assert release(audit_dir, MEDIAN).content["spent"]["releases"] == 1
    assert run_command([*command.split(), "--set", "empty_groups"]) == 0
    assert run_command(command.split()) == 0  # the stored answer


def test_a_hostile_group_name_is_only_a_name(audit_dir):
    name = "<script>alert(1)</script>"
    request = Request((0.5,), epsilon=0.1, by="sex", groups=(name,))
    release(audit_dir, request, empty_groups=True)
    page = (audit_dir / "shareable" / "release.html").read_text(encoding="utf-8")
    assert name not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_release_says_what_it_assumes(audit_dir):
    content = release(audit_dir, Request(mean=True, epsilon=0.5)).content
    text = " ".join(content["assumptions"])
    for words in (
        "add/remove one example",
        "one record",
        "Theorem 3.2",
        "on trust",
        "OpenDP",
        "median norm",
    ):
        assert words in text, words
    for words in (
        "not a differential-privacy guarantee",
        "delta 1e-5",
        "Poisson sampling",
        "exact",
    ):
        assert words in content["meaning"], words
    assert set(content["shares"].values()) == {1 / 6}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s["run"]["declared"].update(chosen_from_data=["max_grad_norm"]),
            "max_grad_norm was chosen from the data",
        ),
        (lambda s: s["run"]["declared"].update(chosen_from_data="C"), "is not a list of texts"),
        (
            lambda s: s["guarantee"].update(status="void", reasons=["it was seeded", "too few"]),
            "void: it was seeded; too few",
        ),
        (lambda s: s["guarantee"].update(status="unproven"), "unproven"),
        (lambda s: s["run"].update(n_units=100), "400 rows belong to 100 people"),
        (lambda s: s["guarantee"].update(worst_case_epsilon=1.0), "different audits"),
        (lambda s: s.pop("run"), "audit.json lacks run"),
    ],
)
def test_where_the_argument_fails_nothing_is_released(audit_dir, edit_audit, change, words):
    edit_audit(change)
    with pytest.raises(InputError, match=words):
        release(audit_dir, MEDIAN)
    assert not (audit_dir / "shareable").exists()
    assert not (audit_dir / "ledger").exists()


def test_declared_independence_is_said(audit_dir, edit_audit):
    edit_audit(lambda summary: summary["run"]["declared"].update(chosen_from_data=[]))
    assert "According to run.json there were none" in " ".join(
        release(audit_dir, MEDIAN).content["assumptions"]
    )


def test_a_clipping_norm_that_moved_is_said(audit_dir, edit_audit):
    edit_audit(lambda summary: summary["run"]["max_grad_norm"].update(max=3.0))
    assert "clipping norm changed during training" in " ".join(
        release(audit_dir, MEDIAN).content["assumptions"]
    )


def test_a_useless_delta_is_told_to_the_curator_only(audit_dir, edit_audit):
    edit_audit(lambda summary: summary["guarantee"].update(delta_times_n=2.0))
    with pytest.warns(PrivacyWarning, match="at least 1/n"):
        content = release(audit_dir, MEDIAN).content
    assert "1/n" not in json.dumps(content)


def test_a_release_of_tight_epsilons_is_warned_about(tmp_path):
    folder = write_small_audit(tmp_path / "audit", epsilons(20), accountant="pld")
    with pytest.warns(PrivacyWarning, match="audit with the RDP accountant"):
        content = release(folder, MEDIAN).content
    assert "1e-9 with the PLD accountant" in " ".join(content["assumptions"])


@pytest.mark.parametrize(
    ("account", "reason"),
    [
        (
            {"accountant": "pld", "tolerance": 1e-4},  # of an earlier version
            "tolerance 0.0001, within which .* make the audit again",
        ),
        ({"neighbouring": "replace_one"}, "audit with --set neighbouring=add_remove"),
        (
            {"sampler": "truncated_poisson", "max_batch_size": 30},
            "depends on the number of examples.*neighbouring=zero_out",
        ),
    ],
)
def test_accounts_whose_records_depend_on_others_are_refused(tmp_path, account, reason):
    folder = write_small_audit(tmp_path / "audit", epsilons(20), **account)
    with pytest.raises(InputError, match=reason):
        release(folder, MEDIAN)


def test_truncated_batches_are_released_where_the_number_of_examples_is_public(tmp_path):
    account = {"sampler": "truncated_poisson", "max_batch_size": 30, "neighbouring": "zero_out"}
    folder = write_small_audit(tmp_path / "audit", epsilons(20), **account)
    assert release(folder, MEDIAN).content["neighbouring"] == "zero_out"


def test_combinations_of_one_name_are_one_group(tmp_path):
    """Else one person could make a group of others vanish."""
    folder = write_small_audit(tmp_path / "audit", np.append(np.full(200, 0.5), 2.0))
    path = folder / "epsilon.parquet"
    ends = [["p", "q × r"]] * 200 + [["p × q", "r"]]
    frame = pd.read_parquet(path)
    attrs, frame[["one", "two"]] = frame.attrs, ends
    frame.attrs = attrs
    frame.to_parquet(path)
    request = Request((0.5,), epsilon=50.0, by="one,two", groups=("p × q × r",))
    figures = release(folder, request).content["groups"]["p × q × r"]
    assert figures["quantiles"]["0.5"] == pytest.approx(0.5, abs=0.001)
    assert figures["count"] == pytest.approx(201, abs=3)


def test_leaving_out_a_person_s_data_takes_one_record_away(tmp_path):
    folder = write_small_audit(tmp_path / "audit", epsilons(20), neighbouring="zero_out")
    content = release(folder, MEDIAN).content
    assert content["neighbouring"] == "zero_out"
    assert (
        "zero out the contribution of one example. A person whose data is left out has no record"
        in (content["assumptions"][0])
    )
    added = release(write_small_audit(tmp_path / "added", epsilons(20)), MEDIAN).content
    assert "left out" not in added["assumptions"][0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_reach_no_mechanism(audit_dir, bad):
    frame = pd.read_parquet(audit_dir / "epsilon.parquet")
    frame.loc[3, "epsilon"] = bad
    frame.to_parquet(audit_dir / "epsilon.parquet")
    with pytest.raises(InputError):
        release(audit_dir, MEDIAN)
    assert not (audit_dir / "ledger").exists()


def test_no_audit_there(tmp_path):
    with pytest.raises(InputError, match="make an audit first"):
        release(tmp_path, MEDIAN)


def test_the_median_norm_of_a_log_chooses_a_clipping_norm(tmp_path):
    log, examples = small_run(n=2000, steps=3)
    run_dir = write_run(tmp_path / "run", log, examples)
    content = release(run_dir, Request((0.5,), epsilon=5.0)).content
    assert log.levels.rounding
    truth = np.median(log.levels.norms(NormLog.open(run_dir).read()[0], 1.0))
    assert content["quantiles"]["0.5"] == pytest.approx(truth, rel=0.05)
    assert content["quantity"].startswith("gradient norm")
    assert content["spent"]["training"] is None
    jsonschema.validate(content, SCHEMA, cls=jsonschema.Draft202012Validator)
    with pytest.raises(InputError, match="only quantiles"):
        release(run_dir, Request(mean=True, epsilon=1.0))


def test_norms_of_a_run_that_replaces_examples_are_private_where_one_is_added(tmp_path):
    """A replaced norm changes two counts, and the median costs twice what the request says."""
    log, examples = small_run(n=50, steps=3)
    run_dir = write_run(tmp_path / "run", replace(log, neighbouring="replace_one"), examples)
    content = release(run_dir, Request((0.5,), epsilon=0.1)).content
    assert content["neighbouring"] == "add_remove"
    assert "add/remove one example" in content["assumptions"][0]
    assert "replaces another, which costs more: twice the epsilon" in content["assumptions"][0]
    plain = release(write_run(tmp_path / "plain", log, examples), MEDIAN).content
    assert "twice" not in plain["assumptions"][0]


def test_norms_kept_in_full_are_rounded_up_to_a_fine_public_grid():
    norms = np.exp(np.random.default_rng(0).normal(1.0, 2.0, 1000)).astype(np.float32)
    grid, codes, text = _norm_grid(norms, FULL_PRECISION, 0.5)
    assert (norms <= grid[codes]).all()
    assert (grid[codes] / norms).max() < 1.005
    assert np.array_equal(grid, _norm_grid(norms[:1], FULL_PRECISION, 0.5)[0])  # not of the data
    assert _norm_grid(np.array([0.0, np.inf]), FULL_PRECISION, 0.5)[1].tolist() == [
        0,
        len(grid) - 1,
    ]
    assert "5,000 values in equal ratios from 5e-05 to 5e+05" in text


def tree(folder):
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", ".writer")
    }


def test_a_cost_of_numpy_is_kept_as_a_number_of_python():
    request = Request((0.5,), epsilon=np.float32(0.5), delta=np.float64(0.0))
    assert json.loads(json.dumps([request.epsilon, request.delta])) == [0.5, 0.0]
