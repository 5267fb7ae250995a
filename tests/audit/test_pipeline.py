import io
import json
import shlex
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import indpriv
from indpriv import EvidenceError, ExampleTable, InputError, _files, account
from indpriv._files import read_parquet
from indpriv._plain import to_json
from indpriv.analysis.groups import group_table
from indpriv.analysis.recorded_run import AuditedRun, Declared, RecordedRun, find_all
from indpriv.attacks import Material
from indpriv.audit import audit, groups_of, read_summary
from indpriv.audit.audit_directory import groups_json, write_audit
from indpriv.cli import run
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import PrivacyWarning
from indpriv.report.report import print_audit
from synthetic import small_run, write_run

from .conftest import DELTA


def screen(summary):
    """What `--verbose` prints, wide enough not to break lines."""
    console = Console(width=300, file=io.StringIO())
    print_audit(summary, console, verbose=True)
    return console.file.getvalue()


quick = pytest.mark.usefixtures("no_extras")


def test_the_directory_holds_everything_and_is_private(audited):
    folder, summary = audited
    names = {
        "epsilon.parquet",
        "audit.json",
        "audit.md",
        "report.html",
        "examples.parquet",
        "examples-non-dp.parquet",
        ".here",
        ".here.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    document = json.loads((folder / "audit.json").read_text())
    assert document == json.loads(json.dumps(summary.to_json()))
    schema = json.loads((Path(indpriv.__file__).parent / "report/audit.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert "SENSITIVE" in (folder / "report.html").read_text()


def test_epsilons_are_the_accountants(audited, artifacts):
    folder, summary = audited
    log, examples = artifacts
    table = account(log, delta=DELTA)
    frame = read_parquet(folder / "epsilon.parquet")
    assert frame.columns[:4].tolist() == ["example_id", "epsilon", "epsilon_lower", "epsilon_upper"]
    assert np.array_equal(frame["epsilon"], table.epsilon)
    assert frame["loss"].tolist() == examples.train["loss"].tolist()
    assert frame["sex"].tolist() == examples.train["sex"].tolist()
    assert frame["age"].tolist() == examples.train["age"].tolist()
    assert frame["correct"].tolist() == examples.train["correct"].tolist()
    assert frame["label"].tolist() == [
        "rich" if label else "poor" for label in examples.train["label"]
    ]
    assert frame.attrs["claim"] == summary.claim == "exact"
    assert summary.guarantee.worst_case_epsilon == table.worst_case_epsilon
    assert summary.guarantee.status == "supported"


def test_what_was_declared_is_used(audited):
    _, summary = audited
    assert summary.name == "tiny"
    assert summary.account.delta == DELTA
    assert [table.by for table in summary.groups] == ["sex", "label"]
    success = summary.rates.query("rate == 'success'")
    assert set(success[["by", "model"]].itertuples(index=False, name=None)) == {
        (by, model) for by in ("", "sex", "label") for model in ("dp", "non_dp")
    }
    words = {line.key: line.status for line in summary.guarantee.lines}
    assert words["duplicates"] == words["preprocessing"] == "declared"
    assert words["tuning"] == "on trust"
    assert not words.keys() & {hazard.key for hazard in summary.hazards}


@quick
def test_arguments_come_before_what_was_declared(run_dir, tmp_path):
    summary = audit(
        run_dir,
        tmp_path / "audit",
        delta=1e-6,
        by=["age:bins=3", "age:bins=3"],
        conversion="mironov2017",
    )
    assert (summary.account.delta, summary.account.conversion) == (1e-6, "mironov2017")
    assert [table.by for table in summary.groups] == ["age:bins=3"]
    assert "--delta 1e-06" in summary.command
    assert "--by age:bins=3" in summary.command


@quick
def test_one_column_may_be_a_text(run_dir, tmp_path):
    summary = audit(run_dir, tmp_path / "audit", delta=1e-5, by="sex")
    assert [table.by for table in summary.groups] == ["sex"]
    assert summary.command.count("--by") == 1


@quick
def test_the_command_reproduces_the_audit(run_dir, tmp_path, capsys):
    delta = 1 / 60_001
    summary = audit(run_dir, tmp_path / "audit", delta=delta, by=["sex"], unreadable="worst_case")
    words = shlex.split(summary.command)
    assert float(words[words.index("--delta") + 1]) == delta
    assert "unreadable=worst_case" in words
    assert run([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["individual"] == summary.to_json()["individual"]


@quick
def test_any_parquet_reader_sees_what_the_epsilons_mean(run_dir, tmp_path):
    audit(run_dir, tmp_path / "audit")
    metadata = json.loads(
        pq.read_schema(tmp_path / "audit" / "epsilon.parquet").metadata[b"indpriv"]
    )
    assert (metadata["claim"], metadata["disclaimer"]) == ("exact", DISCLAIMER)
    account_of = metadata["account"]
    assert (account_of["delta"], account_of["unit"]) == (DELTA, "example")
    assert (account_of["neighbouring"], account_of["sampler"]) == ("add_remove", "poisson")


@quick
def test_later_commands_need_the_audit_directory_only(run_dir, tmp_path, artifacts):
    folder = tmp_path / "audit"
    shutil.copytree(run_dir, tmp_path / "run")
    audit(tmp_path / "run", folder)
    shutil.rmtree(tmp_path / "run")
    (by_sex,) = groups_of(folder, ["sex"])
    log, examples = artifacts
    named = examples.with_label_names(["poor", "rich"])
    expected = group_table(
        account(log, delta=DELTA), named.aligned(log.example_ids), named.test, "sex"
    )
    assert to_json(by_sex) == to_json(expected)
    assert [table.by for table in groups_of(folder, [])] == ["label", "sex", "age:bins=10"]
    for within in (None, "label"):  # one column may be named without a list
        assert [table.by for table in groups_of(folder, "sex", within=within)] == ["sex"]
    (plain,) = groups_json((by_sex,), read_summary(folder))
    assert plain["rows"][0]["mean"] == expected.rows["mean"][0]
    assert plain["claim"] == "exact"
    assert "delta 1e-5" in plain["meaning"]
    json.dumps(plain, allow_nan=False)


def test_fidelity_from_a_log_with_every_step(audited):
    _, summary = audited
    assert {(row.every, row.between_records) for row in summary.fidelity} == {
        (every, rule) for every in (3, 10, 20) for rule in ("last", "closest")
    }
    assert all(row.n == 240 and not row.is_this_log for row in summary.fidelity)
    assert all(row.largest_absolute > 0 for row in summary.fidelity)


def test_fidelity_from_exact_examples(artifacts, tmp_path):
    log, examples = artifacts
    folder = write_run(tmp_path / "run", log.thin(10), examples, exact=7)
    summary = audit(folder, tmp_path / "audit", delta=DELTA)
    assert summary.claim == "estimate"
    own = [row for row in summary.fidelity if row.is_this_log]
    assert [(row.n, row.every) for row in own] == [(7, 10)]
    assert {row.source for row in summary.fidelity} == {"norms at every step of 7 examples"}
    assert summary.run.n_exact_examples == 7


def test_policy_and_cost_of_recording_are_told(audited):
    folder, summary = audited
    text = "a full pass every step; 3.0 s of norm passes beside 2.0 s of training (150 %)"
    told = {item.title: (item.detail, item.status) for item in summary.disclosures}
    assert told["Recording"] == (text, "verified")
    assert text in (folder / "report.html").read_text().replace("\xa0", " ")
    assert text in " ".join(screen(summary).split())
    recorder = json.loads((folder / "audit.json").read_text())["run"]["recorder"]
    assert recorder["policy"] == {
        "every": 1, "growth": 1.0, "longest": None, "free_records": False, "exact_examples": 0, "first": 0
    }  # fmt: skip
    assert (recorder["pass_seconds"], recorder["training_seconds"]) == (pytest.approx(3.0), 2.0)


@quick
@pytest.mark.parametrize("at_levels", [True, False])
def test_individual_clipping_is_exact_where_every_gradient_shows_it(artifacts, tmp_path, at_levels):
    log, examples = artifacts
    clipped = replace(log.thin(10), individually_clipped=True)
    gradients = round(log.total_steps * log.n_examples * 0.1)
    changes = {"gradients": gradients, "gradients_at_levels": gradients - (not at_levels)}
    folder = write_run(tmp_path / "run", clipped, examples, changes=changes)
    summary = audit(folder, tmp_path / "audit", delta=DELTA)
    assert summary.claim == ("exact" if at_levels else "estimate")
    assert summary.guarantee.status == "supported"  # the worst case does not rest on levels
    told = {item.title: (item.detail, item.status) for item in summary.disclosures}
    assert told["Clip mode"][0].startswith("individual: each example at its last recorded level")
    assert told["Clip mode"][1] == ("verified" if at_levels else "failed")
    assert not any("exact values" in text for text in summary.missing)
    text = "clipped each example" if at_levels else "only 719 of 720 gradients"
    assert text in " ".join(screen(summary).split())


@quick
def test_a_run_that_was_killed_before_the_end(artifacts, tmp_path):
    log, _ = artifacts
    folder = write_run(tmp_path / "run", log, None, close=False)
    output = tmp_path / "audit"
    summary = audit(folder, output, delta=DELTA)
    assert summary.individual.n == 240
    assert (summary.loss, summary.groups, len(summary.rates)) == (None, (), 0)
    assert any("examples.parquet is absent" in text for text in summary.missing)
    assert summary.guarantee.status == "unproven"
    assert list(read_parquet(output / "epsilon.parquet").columns[:2]) == ["example_id", "epsilon"]
    with pytest.raises(InputError, match="no groups by sex: this run has no"):
        audit(folder, output, delta=DELTA, by=["sex"])
    with pytest.raises(InputError, match=r"holds no examples\.parquet"):
        groups_of(output, ["sex"])


@quick
def test_an_old_audit_leaves_nothing_behind(artifacts, run_dir, tmp_path):
    output = tmp_path / "audit"
    audit(run_dir, output)
    audit(write_run(tmp_path / "run", artifacts[0], None), output, delta=DELTA)
    assert not (output / "examples.parquet").exists()
    assert not (output / "examples-non-dp.parquet").exists()


def test_a_seeded_run_is_void(artifacts, tmp_path):
    log, examples = artifacts
    folder = write_run(tmp_path / "run", log, examples, recorder={"seeded": True})
    summary = audit(folder, tmp_path / "audit", delta=DELTA)
    assert summary.guarantee.status == "void"
    assert "no differential-privacy guarantee" in summary.guarantee.statement
    assert "(reproducible: no privacy)" in (tmp_path / "audit" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "reason", "status"),
    [
        ({"participations": 9000}, "examples drawn where", "unproven"),
        ({"accountant_steps": 3}, "accountant counted 3 steps where 30 were taken", "unproven"),
        ({"unstepped_draws": 2}, "2 of 30 drawn batches never became a step", "unproven"),
        ({"left_batches": None}, "did not count the batches", "declared"),  # of an earlier version
    ],
)
@quick
def test_failed_evidence_unproves_the_guarantee(artifacts, tmp_path, changes, reason, status):
    log, examples = artifacts
    summary = audit(
        write_run(tmp_path / "run", log, examples, changes=changes), tmp_path / "audit", delta=DELTA
    )
    assert summary.guarantee.status == status
    assert any(reason in text for text in summary.guarantee.reasons)
    assert summary.claim == "estimate"


@quick
@pytest.mark.parametrize(
    "command",
    [
        "audit RUN --output-dir AUDIT --delta 1e-5",
        "check RUN --set only=log",
        "check RUN --set only=settings",
    ],
)
def test_a_command_reads_the_journal_and_each_record_once(
    command, artifacts, tmp_path, monkeypatch
):
    folder = write_run(tmp_path / "run", *artifacts)
    read: list[str] = []
    for module, name in ((_files, "read_journal"), (_files, "sha256")):
        plain = getattr(module, name)

        def counted(path, plain=plain):
            read.append(path.name)
            return plain(path)

        monkeypatch.setattr(module, name, counted)
    places = {"RUN": str(folder), "AUDIT": str(tmp_path / "audit")}
    assert run([places.get(word, word) for word in command.split()]) in (0, 1)
    records = [path.name for path in (folder / "records").iterdir()]
    assert sorted(read) == sorted(["run", *records])


@quick
def test_shuffled_batches_have_no_guarantee_with_secret_participation(artifacts, tmp_path):
    log, examples = artifacts
    shuffled = replace(log, sampler="shuffled")
    folder = write_run(tmp_path / "run", shuffled, examples)
    summary = audit(folder, tmp_path / "audit", delta=DELTA, participation="secret")
    assert (summary.guarantee.status, summary.claim) == ("unproven", "estimate")
    assert "No guarantee is proven" in summary.guarantee.statement
    page = (tmp_path / "audit" / "audit.md").read_text("utf-8").replace("\\", "")
    verdict = page.split("### What you may")[0]
    for reason in summary.guarantee.reasons:  # once, and what to do
        assert verdict.lower().count(reason.lower()) == 1
        assert all(one.advice in verdict for one in summary.checks if one.detail == reason)


@quick
def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        InputError, match="is not a directory; a run directory is what a Recorder writes"
    ):
        audit(tmp_path / "nowhere", tmp_path / "audit")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-10.pt").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"holds no journal\.jsonl \(it holds step-10\.pt\); a run directory is"
    ):
        audit(tmp_path / "checkpoints", tmp_path / "audit")
    assert not (tmp_path / "audit").exists()
    with pytest.raises(InputError, match=r"holds no audit\.json; make an audit first"):
        groups_of(tmp_path, ["sex"])


@quick
def test_a_run_json_of_the_wrong_kind_is_refused(artifacts, tmp_path):
    folder = write_run(tmp_path / "run", *artifacts)
    (folder / "run.json").write_text("[1]")
    with pytest.raises(InputError, match=r"run\.json: the content=\[1\] .* be a JSON object"):
        audit(folder, tmp_path / "audit", delta=DELTA)
    (folder / "run.json").write_text("{")
    with pytest.raises(EvidenceError, match=r"run\.json is damaged.* line 1 column 2"):
        audit(folder, tmp_path / "audit", delta=DELTA)
    (folder / "run.json").unlink()
    with pytest.raises(InputError, match="delta is not given"):
        audit(folder, tmp_path / "audit")
    assert audit(folder, tmp_path / "audit", delta=DELTA).name == "run"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"delta": "small"}, r"run\.json: delta='small' .* should be a valid number"),
        ({"delta": True}, r"run\.json: delta=True .* should be a valid number"),
        ({"groups": "race"}, r"run\.json: groups='race' .* should be a valid list"),
        ({"on_trust": ["x"]}, r"run\.json: on_trust=\['x'\] .* should be a JSON object"),
        ("text", r"run\.json: the content='text' .* should be a JSON object"),
    ],
)
def test_declared_values_of_the_wrong_kind(content, message):
    with pytest.raises(InputError, match=message):
        Declared(content)


@quick
def test_epsilons_that_are_no_numbers_are_an_error(artifacts, run_dir, tmp_path, monkeypatch):
    log, _ = artifacts

    def broken(*_, **__):
        return replace(account(log, delta=DELTA), epsilon=np.full(240, np.nan))

    monkeypatch.setattr("indpriv.audit.pipeline.account_parts", broken)
    with pytest.raises(InputError, match="the accountant gave epsilon=nan"):
        audit(run_dir, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()


@quick
def test_a_directory_that_others_can_enter_is_warned_of(run_dir, tmp_path):
    output = tmp_path / "open"
    output.mkdir(mode=0o755)
    output.chmod(0o755)
    with pytest.warns(PrivacyWarning, match="can be entered by others"):
        audit(run_dir, output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit(run_dir, tmp_path / "closed")


@quick
def test_log_and_examples_of_two_runs_are_refused(artifacts, tmp_path):
    log, examples = artifacts
    other = ExampleTable(examples.frame.assign(example_id=examples.frame["example_id"] + 1000))
    with pytest.raises(InputError, match="not in the example table"):
        audit(write_run(tmp_path / "run", log, other), tmp_path / "audit", delta=DELTA)


@quick
def test_a_metadata_column_named_like_the_accountants_own(artifacts, tmp_path):
    log, examples = artifacts
    clash = ExampleTable(examples.frame.assign(best_order="mine"))
    audit(write_run(tmp_path / "run", log, clash), tmp_path / "audit", delta=DELTA)
    frame = read_parquet(tmp_path / "audit" / "epsilon.parquet")
    assert frame["best_order (metadata)"].eq("mine").all()
    assert frame["best_order"].dtype.kind == "f"
    assert [table.by for table in groups_of(tmp_path / "audit", ["best_order"])] == ["best_order"]


def test_progress_is_told(run_dir, tmp_path):
    told = []
    audit(run_dir, tmp_path / "audit", progress=lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == [
        "reading the log",
        "checking the run",
        "accounting",
        "comparing with larger K",
        "accounting under other choices",
        "analysing",
        "writing",
    ]
    assert all(
        max(done for name, done, _ in told if name == stage) == told[-1][2]
        or stage in ("accounting", "comparing with larger K", "accounting under other choices")
        for stage in stages
    )
    assert all(0 <= done <= total for _, done, total in told)


@quick
def test_a_damaged_record_is_refused_or_counted_at_c(artifacts, tmp_path):
    folder = write_run(tmp_path / "run", *artifacts)
    record = sorted((folder / "records").iterdir())[4]
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.raises(EvidenceError, match=record.name):
        audit(folder, tmp_path / "audit", delta=DELTA)
    counted = audit(folder, tmp_path / "audit", delta=DELTA, unreadable="worst_case")
    whole = account(artifacts[0], delta=DELTA)
    assert np.all(
        read_parquet(tmp_path / "audit" / "epsilon.parquet")["epsilon"] >= whole.epsilon - 1e-12
    )
    assert counted.guarantee.status == "supported"  # the worst case does not rest on a record


@pytest.mark.slow
def test_the_page_of_a_data_set_of_adults_size_is_small(tmp_path):
    log, examples = small_run(n=32_561, steps=3)
    table = account(log, delta=DELTA)
    evidence = RecordedRun(Material(examples), Material(examples))
    run = AuditedRun(log, table, evidence, name="adult")
    write_audit(tmp_path / "audit", run, find_all(run))
    assert (tmp_path / "audit" / "report.html").stat().st_size < 3e6


def test_a_run_is_not_written_over(artifacts, tmp_path):
    run = tmp_path / "run"
    write_run(run, *artifacts)
    before = (run / "examples.parquet").read_bytes()
    with pytest.raises(InputError, match="is the run itself"):
        audit(run, tmp_path / "elsewhere" / ".." / "run", delta=1e-5)
    assert (run / "examples.parquet").read_bytes() == before
    assert not (run / "audit.json").exists()


@quick
def test_a_run_with_a_recorded_holdout(artifacts, tmp_path):
    log, examples = artifacts
    run = write_run(tmp_path / "run", log, examples)
    assert audit(run, tmp_path / "without", delta=DELTA).attack_by_epsilon.empty
    write_run(run / "holdout", log.take(range(len(examples.test))), None)
    found = audit(run, tmp_path / "audit", delta=DELTA).attack_by_epsilon
    for _, part in found.groupby("target_fpr"):
        assert part[["n_members", "n_others"]].sum().tolist() == [240, 60]
    document = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert len(document["attack_by_epsilon"]) == len(found)
