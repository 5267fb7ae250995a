"""A block for a model card on Hugging Face: YAML front matter and Markdown. Releasable.

It sees what the guarantee covers (the worst case, and the disclosures that an audit marks as
publishable) and the content of shareable/release.json, which a mechanism drew. All other figures of
an audit are computed from the data without noise, and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indpriv._files import read_json
from indpriv._formatting import format_delta, format_epsilon
from indpriv._plain import from_json
from indpriv._reading import Text, check, named, table
from indpriv._shown import clean
from indpriv.analysis.guarantee import STANDS
from indpriv.errors import InputError
from indpriv.release.draw import Figures
from indpriv.release.ledger import RELEASE_JSON, SHAREABLE
from indpriv.release.page import error_notes, figures_table, spending
from indpriv.report.document import Listing
from indpriv.report.document import table as shown_table
from indpriv.report.renderers.markdown import escape, render_block

MODEL_CARD = "model-card.md"
_RELEASE = table(
    {
        Text: "quantity meaning unit neighbouring method by?",
        list[Text]: "assumptions",
        dict[str, Any]: "spent groups?",
    }
)
# With sample_rate, the expected batch size itself would give n away, and n is private
_NORMALISATION = {
    "mean": "sum of clipped gradients and noise over the expected, not the sampled, batch size",
    "sum": "sum of clipped gradients and noise, not divided",
}


def render_model_card(summary: Mapping[str, Any], release: Mapping[str, Any] | None) -> str:
    """The block as text; release is the content of release.json, None if nothing was released.

    Raises:
        InputError: a run without a guarantee that may be published, or a release that composes
            with another guarantee.
    """
    public = _public(summary)
    if release is not None:
        _check_same_training(public, release)
    return f"---\n{_front_matter(public)}---\n\n{_body(public, release)}"


def read_release(audit_dir: Path) -> dict[str, Any] | None:
    """The content of shareable/release.json, None if nothing was released."""
    path = audit_dir / SHAREABLE / RELEASE_JSON
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path)
    check(_RELEASE, content, str(path))
    with named(path, "make it again with indpriv release"):
        for figures in (content.get("groups") or {"": content}).values():
            from_json(Figures, figures, RELEASE_JSON)  # and what a page shows of it is there:
        figures_table(content), error_notes(content), spending(content)
    return content


def _public(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What may be published of an audit; the rest of this module sees nothing else of it."""
    try:
        guarantee, account, run = summary["guarantee"], summary["account"], summary["run"]
        status, times_n = guarantee["status"], guarantee["delta_times_n"]
        public = {
            "name": summary["name"],
            "worst_case_epsilon": guarantee["worst_case_epsilon"],
            "evidence": guarantee["evidence"],
            "statement": guarantee["statement"],
            **{
                name: account[name]
                for name in ("delta", "unit", "neighbouring", "sampler", "accountant")
            },
            "participation": account.get("participation", "secret"),
            "normalisation": _NORMALISATION.get(run["recorder"].get("loss_reduction"), ""),
            "settings": [
                (item["item"], item["value"], item["status"])
                for item in summary["disclosures"]
                if item["publishable"] and not item["private"]
            ],
            "version": summary["versions"]["indpriv"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"audit.json is incomplete ({error}); make the audit again") from error
    why = "delta is at least 1/n" if times_n >= 1 else ""
    if status not in STANDS:
        why = f"its guarantee is {status}"
    if why:
        raise InputError(f"a model card may state no guarantee of this run: {why}; see report.html")
    return public


def _check_same_training(public: Mapping[str, Any], release: Mapping[str, Any]) -> None:
    """Refuse a release whose total contains another audit's guarantee."""
    training = release["spent"]["training"]
    if training is None:  # norms before the first step do not depend on training
        return
    if (training["epsilon"], training["delta"]) != (public["worst_case_epsilon"], public["delta"]):
        raise InputError(
            f"{SHAREABLE}/{RELEASE_JSON} composes with a guarantee of epsilon "
            f"{format_epsilon(training['epsilon'])}, delta {format_delta(training['delta'])}, "
            "which is not this audit's; make the release again"
        )


def _front_matter(public: Mapping[str, Any]) -> str:
    """YAML; its texts are written as JSON, which is valid YAML."""
    values: dict[str, Any] = {
        "epsilon": float(format_epsilon(public["worst_case_epsilon"])),
        "delta": float(format_delta(public["delta"])),
        "unit": public["unit"],
        "neighbouring_relation": public["neighbouring"],
        "sampling": public["sampler"],
        "participation": public["participation"],
        "accountant": public["accountant"],
        "covers": "every checkpoint and the final model of one training run",
        "assumptions": public["evidence"],
    }
    lines = ["tags:", "- differential-privacy", "- dp-sgd", "differential_privacy:"]
    return "".join(f"{line}\n" for line in lines) + "".join(
        f"  {name}: {clean(json.dumps(value, ensure_ascii=False))}\n"
        for name, value in values.items()
    )


def _body(public: Mapping[str, Any], release: Mapping[str, Any] | None) -> str:
    settings = [(name, value or "not stated", status) for name, value, status in public["settings"]]
    if public["normalisation"]:
        settings.append(("Normalisation of the gradient", public["normalisation"], "verified"))
    parts = [
        "## Differential privacy",
        escape(f"{public['statement']} Evidence for it: {public['evidence']}."),
        render_block(shown_table(("Setting", "Value", "Status"), settings)),
        "“Verified” was read from the optimizer, the loader or the log, or compared with training; "
        "“declared” was stated and not checked; what is “on trust” nobody can see. The guarantee "
        "covers one training run: neither its tuning nor other uses of the same data.",
    ]
    if release is not None:
        parts += _released(release)
    parts.append(f"Written by indpriv {escape(public['version'])}.")
    return "\n\n".join(parts) + "\n"


def _released(release: Mapping[str, Any]) -> list[str]:
    notes = (*error_notes(release), *spending(release), *release["assumptions"])
    return [
        f"### Private release: {escape(release['quantity'])}",
        escape(release["meaning"]),
        render_block(figures_table(release)),
        render_block(Listing(notes)),
    ]
