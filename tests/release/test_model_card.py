import json

import numpy as np
import pytest

from indpriv._files import read_json
from indpriv.audit import read_summary
from indpriv.cli import run as run_command
from indpriv.errors import InputError
from indpriv.release import Request, release
from indpriv.release.publish import read_release, render_model_card

from .conftest import epsilons, write_small_audit

TRUSTED = "source of the noise on trust; start and rows on trust"


def card(folder):
    return render_model_card(read_json(folder / "audit.json"), read_release(folder))


def test_it_states_the_guarantee_and_every_setting(tmp_path):
    recorder = {
        "loss_reduction": "mean",
        "expected_batch_size": 24,
        "clipping": "flat",
        "secure_mode": False,
    }
    text = card(write_small_audit(tmp_path / "a", epsilons(400), recorder=recorder))
    head, yaml, body = text.split("---\n", 2)
    assert head == ""
    values = dict(
        line.strip().split(": ", 1) for line in yaml.splitlines() if line.startswith("  ")
    )
    assert {name: json.loads(value) for name, value in values.items()} == {
        "epsilon": 2.0, "delta": 1e-5, "unit": "example", "neighbouring_relation": "add_remove", "sampling": "poisson",
        "participation": "secret", "accountant": "rdp", "covers": "every checkpoint and the final model of one training run", "assumptions": f"5 of 5 lines verified; {TRUSTED}",
    }  # fmt: skip
    for words in ("epsilon 2.00 and delta 1e-5 (add/remove one example, Poisson sampling", "| noise_multiplier | 1.1 |",
                  "| max_grad_norm | 1 |", "| sample_rate | 0.1 |", "expected, not the sampled, batch size", "flat"):  # fmt: skip
        assert words in body, words
    assert "24" not in text.replace("1.24", "")


def test_settings_have_all_their_digits_and_epsilons_are_rounded_up(tmp_path):
    """Whoever accounts again from a card must not get a smaller epsilon than the run's."""
    recorder = {"clip_excess": 1e-7, "clipping_norm_epsilon": 0.1004}
    settings = {"noise_multiplier": 1.1234567891, "sample_rate": 1 / 33}
    folder = write_small_audit(tmp_path / "a", epsilons(400), recorder=recorder, settings=settings)
    text = card(folder)
    assert "| 1.1234567891: the optimizer's over 1.0000001, since" in text
    assert "| sample_rate | 0.030303030303030304 |" in text
    assert "a private release of these data, of epsilon 0.11 for a row" in text


def test_audits_that_differ_in_raw_values_give_the_same_bytes(tmp_path):
    first = write_small_audit(tmp_path / "a", epsilons(400, seed=0))
    second = write_small_audit(tmp_path / "b", np.linspace(0.01, 1.2, 350))
    assert card(first) == card(second)


def test_nothing_raw_is_read(tmp_path):
    folder = write_small_audit(tmp_path / "a", epsilons(400), recorder={"loss_reduction": "mean"})
    expected = card(folder)
    summary = read_json(folder / "audit.json")
    read = {"name", "guarantee", "account", "run", "disclosures", "versions"}
    for name in summary.keys() - read:
        summary[name] = "RAW"
    summary["run"] = dict.fromkeys(summary["run"], "RAW") | {
        "recorder": {"loss_reduction": "mean", "other": "RAW"}
    }
    summary["guarantee"] |= {"delta_times_n": 0.123, "reasons": ["RAW"]}
    for item in summary["disclosures"]:
        if item["private"] or item["title"] in (
            "Source of norms",
            "Recording",
            "Number of examples",
        ):
            item["detail"] = "RAW"
    assert render_model_card(summary, None) == expected
    assert "RAW" not in expected


def test_a_setting_that_is_private_is_left_out(tmp_path):
    summary = read_json(write_small_audit(tmp_path / "a", epsilons(400)) / "audit.json")
    for item in summary["disclosures"]:
        item["private"] = item["private"] or item["title"] == "Trust model"
    assert "Trust model" not in render_model_card(summary, None)


def test_what_is_published_does_not_depend_on_titles(tmp_path):
    summary = read_json(write_small_audit(tmp_path / "a", epsilons(400)) / "audit.json")
    before = render_model_card(summary, None)
    for number, item in enumerate(summary["disclosures"]):
        if item["publishable"]:
            before = before.replace(f"| {item['title']} |", f"| title {number} |")
        item["title"] = f"title {number}"
    assert render_model_card(summary, None) == before


def test_a_release_is_quoted_with_its_cost_and_the_total(audit_dir):
    assert read_release(audit_dir) is None
    release(audit_dir, Request((0.5,), False, epsilon=0.25))
    text = card(audit_dir)
    assert "### Private release: individual epsilon" in text
    assert "Training and all releases together: epsilon 2.25, delta 1e-5." in text
    assert "quantile 0.5" in text


@pytest.mark.parametrize("version", [None, 1, 3, "2"])
def test_a_release_of_another_schema_is_refused(audit_dir, version):
    release(audit_dir, Request((0.5,), False, epsilon=0.25))
    path = audit_dir / "shareable" / "release.json"
    path.write_text(json.dumps({**read_json(path), "schema_version": version}))
    with pytest.raises(InputError, match=rf"release\.json has schema_version={version!r}"):
        read_release(audit_dir)


def test_a_release_of_another_account_is_refused(audit_dir, edit_audit):
    release(audit_dir, Request((0.5,), False, epsilon=0.25))
    edit_audit(lambda summary: summary["guarantee"].update(worst_case_epsilon=1.5))
    with pytest.raises(
        InputError, match=r"composes with a guarantee of epsilon 2.00.*make the release again"
    ):
        card(audit_dir)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": "void"}, "void"),
        ({"status": "unproven"}, "unproven"),
        ({"delta_times_n": 1.0}, "at least 1/n"),
    ],
)
def test_without_a_guarantee_there_is_no_card(audit_dir, edit_audit, change, why, capsys):
    edit_audit(lambda summary: summary["guarantee"].update(change))
    assert run_command(["publish", "card", str(audit_dir)]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert not (audit_dir / "shareable" / "model-card.md").exists()


def test_a_broken_audit_is_one_message(audit_dir, edit_audit):
    edit_audit(lambda summary: summary.pop("disclosures"))
    with pytest.raises(InputError, match="lacks disclosures"):
        read_summary(audit_dir)


def test_the_command_writes_it_beside_the_release(audit_dir, capsys):
    assert run_command(["publish", "card", str(audit_dir)]) == 0
    text = (audit_dir / "shareable" / "model-card.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out


def test_declared_texts_stay_text(audit_dir):
    summary = read_json(audit_dir / "audit.json")
    for item in summary["disclosures"]:
        if item["title"] == "Preprocessing":
            item["detail"] = "<img src=x>|a\n---\nb"
    summary["account"]["unit"] = 'x"\ny: 1'
    text = render_model_card(summary, None)
    assert "\\<img src=x\\>\\|a --- b" in text
    assert '  unit: "x\\"\\ny: 1"' in text
