"""From a TOML file to a report on the command line, of data whose people have several rows."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_lines import run
from indpriv import NormLog, account
from indpriv.accountant.rdp import epsilon_offsets
from tests import oracles

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
ORDER = 6.0

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*delta.*")]


def audited(name, folder, **changes):
    """Train an audit of the project, with some lines changed, and audit it; all on the command line."""
    lines = (ROOT / "audits" / f"{name}.toml").read_text().splitlines()
    kept = [line for line in lines if line.split(" =")[0] not in changes]
    text = "\n".join(kept)
    for key, (section, value) in changes.items():
        text = text.replace(
            f"[{section}]", f"[{section}]\n{key} = {value}" if value is not None else f"[{section}]"
        )
    (folder / "audit.toml").write_text(text)
    run_dir, audit_dir = folder / "run", folder / "audit"
    assert (
        run(
            [
                "audits",
                "train",
                str(folder / "audit.toml"),
                "--run-dir",
                str(run_dir),
                "--data-dir",
                str(SHARED),
            ]
        )
        == 0
    )
    assert run(["audit", str(run_dir), "--output-dir", str(audit_dir)]) == 0
    return run_dir, audit_dir, json.loads((audit_dir / "audit.json").read_text())


def rows_of(run_dir):
    """The log, whose rows are whose, and the rows as examples of their own."""
    log = NormLog.open(run_dir)
    alone = NormLog.from_arrays(
        log.levels.norms(log.read(), 1.0),
        log.recorded_steps,
        total_steps=log.total_steps,
        noise_multiplier=log.settings.noise_multiplier,
        max_grad_norm=log.settings.max_grad_norm,
        sample_rate=log.settings.sample_rate,
    )
    return log, alone


def check_against_rows(run_dir, audit_dir, most_rows):
    """People with one row have that row's epsilon; with a few rows, no less than all sets of their rows give."""
    frame = pd.read_parquet(audit_dir / "epsilon.parquet").set_index("unit_id")
    log, alone = rows_of(run_dir)
    table = account(alone, delta=1e-5)
    units = pd.Series(log.unit_ids)
    single = ~units.duplicated(keep=False)
    one_row, as_examples = frame.loc[units[single], "epsilon"], table.epsilon[single.to_numpy()]
    np.testing.assert_allclose(
        one_row, as_examples, rtol=1e-14
    )  # other blocks of a matrix product: the last bit
    several = units[~single]
    smallest = pd.Series(table.epsilon).groupby(log.unit_ids).max()
    assert (frame.loc[several.unique(), "epsilon"] >= smallest[several.unique()]).all()
    assert (frame["epsilon"] <= frame["unit_worst_case"]).all()
    assert frame["n_rows"].max() == most_rows
    norms = np.minimum(
        alone.read() if not alone.levels.rounding else alone.levels.norms(alone.read(), 1.0), 1.0
    )
    sigma, rate = log.settings.noise_multiplier[0], log.settings.sample_rate[0]
    people = account(log, delta=1e-5, orders=[ORDER])
    offset = epsilon_offsets(np.array([ORDER]), 1e-5, "canonne2020")[0]
    for person in frame.index[frame["n_rows"].between(2, 4)][:6]:
        mine = norms[:, (units == person).to_numpy()]
        least = sum(oracles.unit_divergence(step / sigma, rate, ORDER) for step in mine) + offset
        found = people.epsilon[people.example_ids.tolist().index(person)]
        assert max(least, 0) * (1 - 1e-9) <= found <= max(1.3 * (least - offset) + offset, 0) + 1e-9


@pytest.mark.skipif(not (SHARED / "lfw").is_dir(), reason=f"LFW is not in {SHARED}")
def test_lfw_by_person(tmp_path, capsys):
    changes = {"max_rows_per_unit": ("data", None), "epochs": ("training", 1)}
    run_dir, audit_dir, summary = audited("lfw", tmp_path, **changes)
    shown = " ".join(capsys.readouterr().out.split())
    # Their number tells the divisor
    assert "(one user of at most 530 rows zeroed out;" in shown
    assert (summary["run"]["n_units"], summary["run"]["n_examples"]) == (4598, 10968)
    sizes = summary["unit_sizes"]
    assert (sizes[0]["n_units"], sizes[-1]["most"]) == (3250, 530)
    assert sizes[0]["rows_dropped"] == 10968 - 4598
    worst = [row["worst_case_epsilon"] for row in sizes]
    assert worst == sorted(worst)
    assert worst[-1] == summary["guarantee"]["worst_case_epsilon"]
    check_against_rows(run_dir, audit_dir, 530)
    assert not any("seems to say whose row each is" in text for text in summary["missing"])
    assert run(["publish", "statement", str(audit_dir), "--unit", "1871"]) == 0
    assert "for all 530 records together" in " ".join(capsys.readouterr().out.split())
    page = (audit_dir / "report.html").read_text()
    assert "Rows of one user" in page
    assert "no cap was declared" in page


@pytest.mark.skipif(not (SHARED / "lfw").is_dir(), reason=f"LFW is not in {SHARED}")
def test_lfw_by_picture_says_that_people_have_several(tmp_path):
    changes = {
        "max_rows_per_unit": ("data", None),
        "unit_column": ("data", None),
        "epochs": ("training", 1),
    }
    _, _, summary = audited("lfw", tmp_path, **changes)
    assert summary["account"]["unit"] == "example"
    assert summary["unit_sizes"] == []
    assert any("person_id seems to say whose row each is" in text for text in summary["missing"])


def test_adult_by_synthetic_household(tmp_path, capsys):
    run_dir, audit_dir, summary = audited("adult_households", tmp_path, epochs=("training", 1))
    shown = " ".join(capsys.readouterr().out.split())
    assert "(one user of at most 6 rows added or removed;" in shown
    assert "synthetic" in json.loads((run_dir / "run.json").read_text())["data"]["source"]
    assert "synthetic" in (audit_dir / "report.html").read_text()
    assert [row["most"] for row in summary["unit_sizes"]] == [1, 2, 5, 6]
    check_against_rows(run_dir, audit_dir, 6)
