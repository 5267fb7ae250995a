"""RoundRecorder: what it logs, what it refuses, and what a kill leaves."""

import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm as normal

import indpriv
from indpriv import CanaryClients, EvidenceError, InputError, NormLog, RoundRecorder
from indpriv.analysis.attacks.canaries import (
    epsilon_of_length,
    measure_attack,
    measure_gradient_canaries,
)
from indpriv.attack_scores import AttackScores
from indpriv.audit import audit
from indpriv.errors import PrivacyWarning
from indpriv.norm_log import evidence
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.session_counts import DrawCounts
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from processes import running

IDS = [f"c{number}" for number in range(20)]
SETTINGS = {"noise_multiplier": 2.0, "max_grad_norm": 0.5}


def rounds(seed, n_rounds, m=4):
    """(participants, norms) of every round."""
    rng = np.random.default_rng(seed)
    return [(rng.choice(IDS, m, replace=False), rng.gamma(2, 0.3, m)) for _ in range(n_rounds)]


def record(run_dir, found, **options):
    with RoundRecorder(run_dir, IDS, **({"sampler": "fixed_size"} | options)) as recorder:
        for who, norms in found:
            recorder.round(who, norms, **SETTINGS)
    return NormLog.open(run_dir)


def delta_of(epsilon, mu):
    """Of a Gaussian mechanism: Balle and Wang 2018 (arXiv:1805.06530), Theorem 8."""
    return normal.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)


def test_each_client_is_charged_for_its_own_rounds(tmp_path):
    found = rounds(0, 12)
    log = record(tmp_path, found, rounding=0)
    table = indpriv.account(log, delta=1e-3, participation="known")
    assert (table.claim, table.account.unit) == ("exact", "client")
    squares, most = dict.fromkeys(IDS, 0.0), dict.fromkeys(IDS, 0)
    for who, norms in found:
        for client, length in zip(who, norms, strict=True):
            squares[client] += (min(length / 0.5, 1) / 2.0) ** 2
            most[client] += 1
    frame = table.to_frame().set_index("unit_id")
    for client in IDS:
        mu, epsilon = np.sqrt(squares[client]), frame.loc[client, "epsilon"]
        assert frame.loc[client, "mu"] == pytest.approx(mu, rel=1e-12)
        if mu:
            assert delta_of(epsilon, mu) == pytest.approx(1e-3, rel=1e-4)
    worst = np.sqrt(max(most.values())) / 2
    assert delta_of(table.worst_case_epsilon, worst) == pytest.approx(1e-3, rel=1e-4)


def test_the_log_of_coins_is_the_one_from_arrays(tmp_path):
    rng = np.random.default_rng(1)
    taking = rng.random((30, len(IDS))) < 0.2
    norms = rng.gamma(2, 0.3, taking.shape)
    with RoundRecorder(tmp_path, IDS, sampler="poisson") as recorder:
        for number, (row, lengths) in enumerate(zip(taking, norms, strict=True)):
            recorder.round(
                np.array(IDS)[row][::-1],
                lengths[row][::-1],
                sample_rate=0.2,
                number=number,
                **SETTINGS,
            )
    steps, positions = np.nonzero(taking)
    expected = NormLog.from_arrays(
        np.zeros((0, len(IDS))),
        np.zeros(0, int),
        total_steps=30,
        sample_rate=0.2,
        example_ids=IDS,
        unit="client",
        unit_ids=IDS,
        neighbouring="zero_out",
        batch_norms=(steps, positions, norms[taking]),
        **SETTINGS,
    )
    for options in ({}, {"participation": "known"}):
        ours, theirs = (
            indpriv.account(log, delta=1e-3, **options)
            for log in (NormLog.open(tmp_path), expected)
        )
        assert np.array_equal(ours.epsilon, theirs.epsilon)
        assert ours.worst_case_epsilon == theirs.worst_case_epsilon


def test_an_audit_speaks_of_clients(tmp_path):
    record(tmp_path / "run", rounds(0, 10), run_info={"delta": 1e-3, "scheme": "Fed-SDP"})
    summary = audit(tmp_path / "run", tmp_path / "report")
    assert summary.guarantee.status == "declared"
    assert (
        "zero out the contribution of one client, participation known"
        in summary.guarantee.statement
    )
    assert "federated trainer" in summary.guarantee.reasons[0]
    checks = verify(open_run(tmp_path / "run"))
    details = {check.key: check.detail for check in checks}
    assert details["took_part"] == (
        "40 participations in 10 steps, as counted at each step for each client"
    )
    assert pd.read_parquet(tmp_path / "report/epsilon.parquet")["unit_id"].tolist() == IDS
    assert json.loads((tmp_path / "run/run.json").read_text())["scheme"] == "Fed-SDP"
    assert not any("example" in check.title for check in checks)


def test_rows_may_share_clients(tmp_path):
    """The log of rows, from several local steps of a round at once."""
    with RoundRecorder(
        tmp_path, range(6), sampler="fixed_size", unit="example", unit_ids=list("aabbcc")
    ) as recorder:
        recorder.steps([[0, 1], [1, 4]], [[0.1, 0.2], [0.3, 0.4]], **SETTINGS)
        assert recorder.n_rounds == 2
    log = NormLog.open(tmp_path)
    entries = log.batch_norms.read(0, 6)
    assert (entries.position.tolist(), entries.step.tolist()) == ([0, 1, 1, 4], [0, 0, 1, 1])
    assert log.unit_ids.tolist() == list("aabbcc")


def test_clients_of_several_rows_are_audited_from_the_log_of_rows(tmp_path):
    with RoundRecorder(
        tmp_path / "r",
        range(6),
        sampler="fixed_size",
        unit="user",
        unit_ids=list("aabbcc"),
        run_info={"delta": 1e-3},
    ) as recorder:
        recorder.round([0, 1, 4], [9.0, 9.0, 9.0], **SETTINGS)
    summary = audit(tmp_path / "r", tmp_path / "report")
    assert "user of at most 2 rows" in summary.guarantee.statement
    assert delta_of(summary.guarantee.worst_case_epsilon, 2 / 2.0) == pytest.approx(1e-3, rel=1e-4)
    assert summary.unit_sizes == ()


def test_norms_in_float32_are_rounded_up_and_make_an_estimate(tmp_path):
    log = record(tmp_path, [(IDS[:2], np.array([0.1, 0.2], np.float32))], rounding=0)
    assert (log.batch_norms.read(0, 2).norm > [0.1, 0.2]).all()
    table = indpriv.account(log, delta=1e-3, participation="known")
    assert table.claim == "estimate"
    assert "float32" in table.claim_reason


def test_infinite_norms_count_as_clipped(tmp_path):
    with pytest.warns(PrivacyWarning, match="count as clipped"):
        log = record(tmp_path, [(["c3"], [np.inf])])
    table = indpriv.account(log, delta=1e-3, participation="known")
    assert table.epsilon[3] == table.worst_case_epsilon


REFUSED = {
    "unknown": ((["c1", "x"], [0.1, 0.1]), {}, "1 of 2 participants are not among the 20"),
    "another kind": (
        ([1], [0.1]),
        {},
        r"1 of 1 participants are not among.*of one kind \(participants are int64, client_ids str",
    ),
    "repeated": ((["c1", "c2", "c1"], [0.1] * 3), {}, "1 participants are named twice.*'c1'"),
    "more than all": (([*IDS, "c20"], [0.1] * 21), {}, "not among the 20 client_ids"),
    "NaN": ((["c1", "c2"], [0.1, np.nan]), {}, r"NaN gradient norms.*\['c2'\]"),
    "negative": ((["c1", "c2"], [-0.1, 1]), {}, r"negative gradient norms.*\['c1'\]"),
    "lengths": ((["c1", "c2"], [0.1]), {}, "one norm for each participant"),
    "texts": ((["c1"], ["0.1"]), {}, "must be numbers"),
    "order": ((["c1"], [0.1]), {"number": 2}, "round 2 follows 0 recorded rounds"),
    "no noise": ((["c1"], [0.1]), {"noise_multiplier": 0.0}, "noise_multiplier=0.0 is not"),
    "no clipping": ((["c1"], [0.1]), {"max_grad_norm": np.inf}, "max_grad_norm=inf is not"),
    "settings": ((["c1", "c2"], [0.1, 0.1]), {"max_grad_norm": [0.5, 1]}, "share one setting"),
    "more than planned": (
        (IDS[:8], np.ones(8)),
        {"sample_rate": 0.2},
        r'8 took part in a round of sampler="fixed_size" that draws 4 \(sample_rate=0.2\)',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_round_leaves_no_trace(name, tmp_path):
    given, changed, message = REFUSED[name]
    with RoundRecorder(tmp_path, IDS, sampler="fixed_size") as recorder:
        with pytest.raises(InputError, match=message):
            recorder.round(*given, **(SETTINGS | changed))
        recorder.round(["c5"], [0.1], **SETTINGS)
    log = NormLog.open(tmp_path)
    assert log.batch_norms.read(0, 20).position.tolist() == [5]
    assert log.most_participations == 1


def test_what_clipping_per_layer_leaves_is_not_longer_than_max_grad_norm(tmp_path):
    with RoundRecorder(tmp_path, IDS, sampler="fixed_size", clipping="per_layer") as recorder:
        with pytest.raises(InputError, match=r"0.6 long, and clipping per layer leaves none above"):
            recorder.round(["c1"], [0.6], **SETTINGS)
        recorder.round(["c1"], [0.5 * (1 + 1e-5)], **SETTINGS)


@pytest.mark.parametrize(
    ("sizes", "rate", "claim"),
    [
        ([4] * 12, None, "exact"),
        ([4] * 12, 4 / 20, "exact"),
        ([4, 4, 3, 4], None, "estimate"),
        ([3, 4], None, "estimate"),
        ([3, 3], 4 / 20, "estimate"),
        ([], None, "exact"),
    ],
)
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_who_drops_out_of_a_set_of_fixed_size_may_tell(sizes, rate, claim, relation, tmp_path):
    """A client that is left out since its update is long leaves no trace but the size."""
    with RoundRecorder(tmp_path, IDS, sampler="fixed_size") as recorder:
        for m in sizes:
            recorder.round(IDS[:m], np.full(m, 0.2), sample_rate=rate, **SETTINGS)
        if not sizes:  # of which steps() may have none
            recorder.steps([], [], **SETTINGS)
            recorder.round(IDS[:4], np.full(4, 0.2), **SETTINGS)
    log = NormLog.open(tmp_path)
    known = {"participation": "known"} if relation == "zero_out" else {"neighbouring": relation}
    table = indpriv.account(log, delta=1e-3, **known)
    assert table.claim == claim
    assert ("who drops out, or is not connected, may depend on" in table.claim_reason) == (
        claim != "exact"
    )


def by_coins(rng, n, rate):
    return np.flatnonzero(rng.random(n) < rate)


OTHERS_BY_COINS = {
    "one size": lambda rng, n: rng.choice(n, n // 5, replace=False),
    "in turn": lambda rng, n: (np.arange(n // 5) + rng.integers(5) * (n // 5)) % n,
    "clients": lambda rng, n: np.flatnonzero(np.tile(rng.random(n // 4) < 0.2, 4)),
}


@pytest.mark.filterwarnings("ignore:unit=.example")
@pytest.mark.parametrize("name", ["coins", *OTHERS_BY_COINS])
def test_rounds_that_were_not_drawn_by_coins_are_refuted(name, tmp_path):
    rng, n = np.random.default_rng(3), 40
    draw = OTHERS_BY_COINS.get(name, lambda rng, n: by_coins(rng, n, 0.2))
    owners = [f"client {number % 10}" for number in range(n)]
    options = {"unit": "example", "unit_ids": owners, "run_info": {"delta": 1e-3}}
    with RoundRecorder(tmp_path / "run", range(n), sampler="poisson", **options) as recorder:
        for _ in range(40):
            who = draw(rng, n)
            recorder.round(who, np.ones(len(who)), sample_rate=0.2, **SETTINGS)
    checks = {check.key: check for check in verify(open_run(tmp_path / "run"))}
    sound = name == "coins"
    assert checks["batch_sizes"].status == ("passed" if sound else "failed")
    words = {"clients": "share the coin of their client"}.get(name, "batches of one size")
    assert (words in checks["batch_sizes"].detail) == (not sound)
    status = audit(tmp_path / "run", tmp_path / "report").guarantee.status
    assert status == ("declared" if sound else "unproven")


def test_coins_are_rarely_refuted():
    """Of the three tests of sizes: at most one in a million, so none in 300 runs."""
    rng = np.random.default_rng(4)
    for rate, n, rounds_ in ((0.5, 6, 30), (0.02, 200, 60), (1.0, 8, 5)):
        for _ in range(100):
            drawn = rng.random((rounds_, n)) < rate
            sizes, whole = drawn.sum(axis=1), drawn.reshape(rounds_, -1, 2).all(axis=2).sum()
            counts = DrawCounts.of(
                drawn.sum(axis=0),
                draws=rounds_,
                expected=rate * rounds_,
                variance=rate * (1 - rate) * rounds_,
                size_min=int(sizes.min()),
                size_max=int(sizes.max()),
                together=float(whole),
                together_expected=rounds_ * n / 2 * rate**2,
            )
            state = SimpleNamespace(header={"n_examples": n})
            session = SimpleNamespace(draws=counts, rounds=None, sampler="poisson")
            assert evidence._of_draws(state, session)[0].status == "passed"


@pytest.mark.parametrize(
    ("ids", "who", "sound"),
    [
        ([2**53, 2**53 + 1], [2.0**53], [2**53]),
        ([2**60, 2**60 + 1], [2.0**60], np.array([2**60], np.uint64)),
    ],
)
def test_a_participant_is_the_client_of_its_very_id(ids, who, sound, tmp_path):
    """As floats, two clients are one."""
    with RoundRecorder(tmp_path, ids, sampler="other") as recorder:
        with pytest.raises(InputError, match="1 of 1 participants are not among the 2 client_ids"):
            recorder.round(who, [0.1], **SETTINGS)
        recorder.round(sound, [0.1], **SETTINGS)
    assert NormLog.open(tmp_path).batch_norms.read(0, 2).position.tolist() == [0]


def test_coins_need_their_rate(tmp_path):
    with (
        RoundRecorder(tmp_path, IDS, sampler="poisson") as recorder,
        pytest.raises(InputError, match="without sample_rate"),
    ):
        recorder.round(["c1"], [0.1], **SETTINGS)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty"),
        (["a", "a"], {}, "client_ids has 1 duplicates, e.g. 'a'"),
        ({"a", "b"}, {}, "client_ids has shape .*; pass a list"),
        (["a", None], {}, "client_ids lacks a value for 1 of 2 rows"),
        (IDS, {"canaries": 100}, "canaries=100 is no indpriv.CanaryClients"),
        (IDS, {"sampler": "random"}, "sampler='random' is not known"),
        (IDS, {"rounding": 2}, "rounding=2"),
        (IDS, {"resume_at": -1}, "resume_at=-1"),
    ],
)
def test_a_recorder_that_cannot_be_made(ids, options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        RoundRecorder(tmp_path / "run", ids, **({"sampler": "fixed_size"} | options))
    assert not (tmp_path / "run").exists()


def test_a_run_is_continued_after_the_round_of_a_model(tmp_path):
    found = rounds(2, 9)
    with (
        pytest.raises(KeyboardInterrupt),
        RoundRecorder(tmp_path, IDS, sampler="fixed_size") as recorder,
    ):
        for who, norms in found[:6]:
            recorder.round(who, norms, **SETTINGS)
        raise KeyboardInterrupt
    with pytest.raises(InputError, match="already holds a recorded run"):
        RoundRecorder(tmp_path, IDS, sampler="fixed_size")
    with pytest.raises(InputError, match="proves only 6"):
        RoundRecorder(tmp_path, IDS, sampler="fixed_size", resume_at=7)
    with pytest.raises(EvidenceError, match="ids_fingerprint"):
        RoundRecorder(tmp_path, IDS[::-1], sampler="fixed_size", resume_at=6)
    log = record(tmp_path, found[6:], resume_at=6)
    whole = record(tmp_path / "whole", found)
    ours, theirs = (indpriv.account(one, delta=1e-3, participation="known") for one in (log, whole))
    assert np.array_equal(ours.epsilon, theirs.epsilon)
    assert ours.claim == "exact"
    assert {check.key: check.status for check in verify(open_run(tmp_path))}[
        "took_part"
    ] == "passed"


def test_clients_that_drop_out_after_resuming_make_an_estimate(tmp_path):
    record(tmp_path, rounds(2, 3))
    log = record(tmp_path, rounds(2, 3, m=3), resume_at=3)
    assert indpriv.account(log, delta=1e-3, participation="known").claim == "estimate"
    assert any("fewer clients took part" in caveat for caveat in log.known_caveats)


def test_rounds_behind_a_later_model_become_void(tmp_path):
    found = rounds(2, 9)
    record(tmp_path, found[:6])
    log = record(tmp_path, found[6:], resume_at=4)
    assert log.total_steps == 7
    assert any("2 rounds were declared void" in caveat for caveat in log.known_caveats)


@pytest.mark.parametrize("moment", ["free", "steps"])
def test_nothing_follows_half_a_round(moment, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    found = rounds(3, 4)
    recorder = RoundRecorder(tmp_path, IDS, sampler="fixed_size")
    recorder.round(*found[0], **SETTINGS)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(NormLogWriter, moment, full)
        recorder.round(*found[1], **SETTINGS)
    with pytest.raises(InputError, match="is closed; resume_at= continues it"):
        recorder.round(*found[2], **SETTINGS)
    log = record(tmp_path, found[1:], resume_at=1)
    assert np.array_equal(
        indpriv.account(log, delta=1e-3, participation="known").epsilon,
        indpriv.account(
            record(tmp_path / "whole", found), delta=1e-3, participation="known"
        ).epsilon,
    )


ROUNDS_WHILE_TESTED = """
import os
import numpy as np
from indpriv import RoundRecorder
ids = np.arange(50)
tester = os.getppid()
with RoundRecorder({run_dir!r}, ids, sampler="fixed_size") as recorder:
    for number in range(100_000):
        who = (7 * number + np.arange(5)) % 50
        recorder.round(who, who / 50, noise_multiplier=1.0, max_grad_norm=1.0)
        os.write(1, b"%d\\n" % number)
        if os.getppid() != tester:
            break
"""


def killed_at_a_random_moment(run_dir, seed):
    """Number of rounds that a recorder had acknowledged when it was killed."""
    code = ROUNDS_WHILE_TESTED.format(run_dir=str(run_dir))
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        first = process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.3))
        process.kill()
        return len((first + process.stdout.read()).decode().split("\n")) - 1


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 30))]
)
def test_a_kill_loses_no_acknowledged_round(seed, tmp_path):
    acknowledged = killed_at_a_random_moment(tmp_path, seed)
    log = NormLog.open(tmp_path)
    assert acknowledged <= log.total_steps <= acknowledged + 1
    steps = np.arange(log.total_steps)
    expected = sorted((7 * step + k) % 50 * 1_000_000 + step for step in steps for k in range(5))
    entries = log.batch_norms.read(0, 50)
    assert (entries.position.astype(int) * 1_000_000 + entries.step).tolist() == expected
    with RoundRecorder(tmp_path, np.arange(50), sampler="fixed_size", resume_at=log.total_steps):
        pass
    assert not read_state(tmp_path).voided_steps
    assert os.listdir(tmp_path / "records")


# --- canary clients

SIZE = 6000
FEDERATED = {"noise_multiplier": 1.0, "max_grad_norm": 0.5}


def simulate(folder, canaries, *, n_rounds=60, rate=0.2, seed=0, noise=1.0, known=True):
    """A federated run of clients whose updates point one way, with canaries beside them."""
    rng, ids = np.random.default_rng(seed), np.arange(50)
    updates = rng.normal(size=(50, canaries.size)) + 1
    with RoundRecorder(folder, ids, sampler="poisson", canaries=canaries) as recorder:
        for _ in range(n_rounds):
            who = np.flatnonzero(rng.random(50) < rate)
            norms = np.linalg.norm(updates[who], axis=1)
            clients_sum = (0.5 / norms) @ updates[who]
            joined = canaries.join(sample_rate=rate, max_grad_norm=0.5)
            released = clients_sum + joined + noise * 0.5 * rng.normal(size=canaries.size)
            more = {"clients_sum": clients_sum} if known else {}
            recorder.round(who, norms, sample_rate=rate, released=released, **more, **FEDERATED)
    return NormLog.open(folder)


def test_canary_clients_are_unit_vectors_of_their_own_coordinates():
    canaries = CanaryClients(7, 100, lengths=(1.0, 0.5), seed=1)
    canaries.evidence.member[:] = True
    total = canaries.join(sample_rate=1.0, max_grad_norm=3.0)
    assert np.count_nonzero(total) == 98
    lengths = np.resize([1.0, 0.5], 7)
    assert total @ total == pytest.approx((9 * lengths**2).sum())
    assert canaries.checked(total, None, (1.0, 3.0)) == pytest.approx(3 * lengths)
    canaries.evidence.member[:] = False
    assert not canaries.join(sample_rate=1.0, max_grad_norm=3.0).any()


def test_canary_clients_agree_with_the_account_and_bound_it(tmp_path):
    canaries = CanaryClients(1000, SIZE, lengths=(1.0, 0.5), seed=3)
    log = simulate(tmp_path, canaries)
    scores = AttackScores.from_file(tmp_path / "gradient-canaries.parquet")
    assert (len(scores.scores), scores.fair_coins, scores.adversary) == (1000, True, "updates")
    found = measure_gradient_canaries(scores, log.settings)
    assert found.agree
    assert [one.length for one in found.lengths] == [0.5, 1.0]
    for one in found.lengths:
        assert 0 < max(bound.epsilon for bound in one.bounds.values()) < one.ceiling
    assert all(fact.status != "failed" for fact in verify(open_run(tmp_path)))
    result = audit(tmp_path, tmp_path / "audit", participation="known", delta=1e-5)
    assert result.gradient_canaries.agree


def test_canary_clients_find_noise_that_is_not_there(tmp_path):
    canaries = CanaryClients(1000, SIZE, seed=3)
    log = simulate(tmp_path, canaries, noise=0.5)
    scores = AttackScores.from_file(tmp_path / "gradient-canaries.parquet")
    assert not measure_gradient_canaries(scores, log.settings).agree


def test_an_attacker_who_sees_the_releases_alone_proves_less_but_soundly(tmp_path):
    log = simulate(tmp_path, CanaryClients(1000, SIZE, seed=3), known=False)
    assert not (tmp_path / "gradient-canaries.parquet").exists()
    scores = AttackScores.from_file(tmp_path / "canaries.parquet")
    bound = measure_attack(scores, delta=1e-5).bounds["steinke2023"].epsilon
    assert 0 < bound < epsilon_of_length(log.settings, 1.0, 1e-5)


def test_canary_clients_that_send_nothing_prove_nothing(tmp_path):
    """Null calibration: 300 draws; a bound above 0 is a false alarm, at most 5 % of them."""
    alarms = disagreements = 0
    rng = np.random.default_rng(8)
    for draw in range(300):
        canaries = CanaryClients(100, 100, seed=draw)
        for _ in range(5):
            setting = {"sample_rate": 0.5, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
            canaries.join(sample_rate=0.5, max_grad_norm=1.0)
            seen = canaries.checked(rng.normal(size=100), None, (0.5, 1.0))
            canaries.evidence.observe(seen, setting)
        found = measure_attack(canaries.evidence.scores("canaries"), delta=1e-5)
        alarms += found.bounds["steinke2023"].epsilon > 0
        ends = found.overall["auc_interval"]
        disagreements += not ends.low <= 0.5 <= ends.high
    assert alarms <= 15 + 4 * 4
    assert disagreements <= 15 + 4 * 4


def _round(recorder, canaries, **options):
    canaries.join(sample_rate=0.5, max_grad_norm=0.5)
    given = {"sample_rate": 0.5, "released": np.zeros(30)} | FEDERATED | options
    recorder.round(["c1"], [1.0], **given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"released": None}, "released must be the 30 finite values"),
        ({"released": np.zeros(29)}, "released must be the 30 finite values"),
        ({"released": np.full(30, np.nan)}, "released must be the 30 finite values"),
        ({"clients_sum": np.zeros((30, 1))}, "clients_sum must be the 30 finite values"),
        ({"sample_rate": 0.4}, "call canaries.join once before each round"),
        ({"sample_rate": None}, "call canaries.join once before each round"),
        ({"max_grad_norm": 1.0}, "call canaries.join once before each round"),
    ],
)
def test_a_round_that_canaries_cannot_judge_is_not_written(tmp_path, options, match):
    canaries = CanaryClients(10, 30)
    with RoundRecorder(tmp_path, IDS, sampler="fixed_size", canaries=canaries) as recorder:
        with pytest.raises(InputError, match=match):
            _round(recorder, canaries, **options)
        assert recorder.n_rounds == 0
        _round(recorder, canaries)
        with pytest.raises(InputError, match=r"canaries.join once"):  # they did not join again
            recorder.round(["c1"], [1.0], sample_rate=0.5, released=np.zeros(30), **FEDERATED)


def test_a_round_that_the_log_refuses_is_none_of_the_canaries(tmp_path):
    canaries = CanaryClients(10, 30)
    with RoundRecorder(tmp_path, IDS, sampler="fixed_size", canaries=canaries) as recorder:
        canaries.join(sample_rate=0.5, max_grad_norm=0.5)
        given = {"sample_rate": 0.5, "released": np.zeros(30), **FEDERATED}
        with pytest.raises(InputError, match="are not among"):
            recorder.round(["nobody"], [1.0], **given)
        assert not canaries.evidence.scores("").scores.any()
        recorder.round(["c1"], [1.0], **given)  # the same canaries, in the round as it was
    assert (canaries.n_rounds, recorder.n_rounds) == (1, 1)


def test_bad_canary_clients_are_refused(tmp_path):
    for arguments, match in (
        ((31, 30), "31 canary clients need as many coordinates"),
        ((0, 30), "count"),
        ((3, 0), "size"),
    ):
        with pytest.raises(InputError, match=match):
            CanaryClients(*arguments)
    with pytest.raises(InputError, match="lengths"):
        CanaryClients(3, 30, lengths=(1.5,))
    canaries = CanaryClients(10, 30)
    with pytest.raises(InputError, match="continue this log without them"):
        RoundRecorder(tmp_path, IDS, sampler="fixed_size", canaries=canaries, resume_at=0)
    with (
        pytest.raises(InputError, match="1 rounds did not pass what they released"),
        RoundRecorder(tmp_path, IDS, sampler="fixed_size", canaries=canaries) as recorder,
    ):
        recorder.steps([["c1"]], [[1.0]], **FEDERATED)
