import json
import zipfile

import numpy as np
import pandas as pd
import pytest

import indpriv
from indpriv import InputError, NormLog
from indpriv.norm_log.convert import convert
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

SETTINGS = {
    "steps": 30,
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
    "sample_rate": 0.1,
    "sampler": "poisson",
    "unit": "example",
    "neighbouring": "add_remove",
}
STEPS = np.array([0, 5, 20])


def norms(dtype=np.float64):
    return np.random.default_rng(0).gamma(2.0, 0.3, (3, 50)).astype(dtype)


def write(folder, *, settings=None, parquet=False, **arrays):
    """The two files, in folder."""
    arrays = {"norms": norms(), "recorded_steps": STEPS} | arrays
    (folder / "run.json").write_text(json.dumps(SETTINGS | (settings or {})))
    if not parquet:
        np.savez_compressed(folder / "norms.npz", **arrays)
        return folder / "norms.npz"
    frame = pd.DataFrame(
        {str(step): row for step, row in zip(STEPS.tolist(), arrays["norms"], strict=True)}
    )
    for name in set(arrays) - {"norms", "recorded_steps"}:
        frame.insert(0, name.replace("_ids", "_id"), arrays[name])
    frame.to_parquet(folder / "norms.parquet", index=False)
    return folder / "norms.parquet"


def converted(folder, rounding=0.01, **options):
    convert(write(folder, **options), folder / "run.json", folder / "run", rounding=rounding)
    return NormLog.open(folder / "run")


def statuses(run_dir):
    return {check.title: check.status for check in verify(open_run(run_dir))}


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize(
    "ids", [np.arange(50)[::-1].copy(), np.array([f"p{i}" for i in range(50)])]
)
def test_the_log_is_the_one_from_arrays(parquet, ids, tmp_path):
    log = converted(tmp_path, parquet=parquet, example_ids=ids, unit_ids=np.arange(50) + 100)
    expected = NormLog.from_arrays(
        norms(),
        STEPS,
        total_steps=30,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        example_ids=ids,
    )
    assert np.array_equal(log.read(), expected.read())
    assert log.recorded_steps.tolist() == STEPS.tolist()
    assert log.example_ids.tolist() == ids.tolist()
    assert log.unit_ids.tolist() == (np.arange(50) + 100).tolist()
    ours, theirs = (
        indpriv.account(x, delta=1e-5, between_records="worst_case") for x in (log, expected)
    )
    assert np.array_equal(ours.epsilon, theirs.epsilon)
    assert ours.claim == "estimate"  # no recorder watched
    assert "another trainer" in ours.claim_reason


def test_columns_of_a_parquet_file_may_stand_in_any_order(tmp_path):
    frame = pd.DataFrame({"20": [0.3], "5": [0.2], "0": [0.1]})
    frame.to_parquet(tmp_path / "norms.parquet")
    (tmp_path / "run.json").write_text(json.dumps(SETTINGS))
    convert(tmp_path / "norms.parquet", tmp_path / "run.json", tmp_path / "run")
    assert NormLog.open(tmp_path / "run").read()[:, 0].tolist() == [10, 20, 30]


def test_settings_that_move_are_those_of_each_step(tmp_path):
    sigmas = np.linspace(1, 2, 30).tolist()
    log = converted(
        tmp_path, settings={"noise_multiplier": sigmas, "max_grad_norm": [1.0] * 10 + [0.5] * 20}
    )
    assert log.settings.noise_multiplier.tolist() == sigmas
    assert log.settings.max_grad_norm.tolist() == [1.0] * 10 + [0.5] * 20
    assert (
        log.levels.relative(log.read()[2]).tolist()
        == log.levels.relative(log.levels.encode(norms()[2], 0.5)).tolist()
    )


def test_narrow_numbers_are_never_rounded_below_what_they_stood_for(tmp_path):
    log = converted(tmp_path, rounding=0, norms=norms(np.float16))
    assert np.all(log.read() >= norms())
    assert any("float16" in caveat for caveat in log.caveats)


def test_what_can_be_checked_is_and_the_rest_is_not_called_checked(tmp_path):
    converted(tmp_path, participations=np.random.default_rng(1).binomial(30, 0.1, 50))
    found = statuses(tmp_path / "run")
    assert (
        found["participation of each example"]
        == found["batch sizes"]
        == found["records"]
        == "passed"
    )
    assert {
        found[name] for name in ("sampler (declared)", "training", "run.json", "norm pass")
    } == {"not checked"}
    assert "failed" not in found.values()


@pytest.mark.parametrize(
    "drawn", [np.full(300, 3), np.r_[30, np.full(299, 3)]], ids=["shuffled", "one in each batch"]
)
def test_draws_that_are_not_poisson_are_found(drawn, tmp_path):
    many = np.tile(norms(), 6)
    log = converted(tmp_path, norms=many, participations=drawn)
    assert statuses(tmp_path / "run")["participation of each example"] == "failed"
    assert any("each example was drawn" in caveat for caveat in log.caveats)


def test_a_seeded_run_says_so(tmp_path):
    assert any(
        "no privacy" in caveat for caveat in converted(tmp_path, settings={"seeded": True}).caveats
    )


def test_an_audit_of_it_calls_its_guarantee_declared(tmp_path):
    from indpriv.audit import audit

    converted(tmp_path, settings={"delta": 1e-5})
    summary = audit(tmp_path / "run", tmp_path / "audit")
    assert summary.guarantee.status == "declared"
    assert summary.claim == "estimate"


BAD_ARRAYS = {
    "NaN gradient norms": {"norms": np.where(np.arange(50) == 7, np.nan, norms())},
    "negative gradient norms for 50": {"norms": -norms()},
    "step 0: NaN": {"norms": np.full((3, 50), np.nan)},
    "norms has shape": {"norms": norms()[0]},
    "whole number per record": {"recorded_steps": STEPS * 1.0},
    "strictly increasing": {"recorded_steps": STEPS[::-1]},
    "ends at 30, but": {"recorded_steps": np.array([0, 1, 30])},
    "49 duplicates": {"example_ids": np.zeros(50)},
    "one id per example": {"example_ids": np.arange(49)},
    "unit_ids has shape": {"unit_ids": np.arange(3)},
    "participations must be": {"participations": np.full(50, 31)},
    "are <U": {"norms": norms().astype(str)},
    "step 0: norms are complex128": {"norms": norms().astype(complex)},
    "has arrays": {"sizes": np.zeros(3)},
    "no examples": {"norms": np.zeros((3, 0))},
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_bad_norms_are_refused_and_nothing_is_written(message, tmp_path):
    with pytest.raises(InputError, match=message):
        converted(tmp_path, **BAD_ARRAYS[message])
    assert not (tmp_path / "run").exists()


BAD_SETTINGS = {
    "sample_rate=1.5": {"sample_rate": 1.5},
    "nan is no number of JSON": {"noise_multiplier": float("nan")},
    "noise_multiplier=0": {"noise_multiplier": 0},
    "noise_multiplier=True .* one number, or a list with one number per step": {
        "noise_multiplier": True
    },
    "pass one value, or the realised value": {"max_grad_norm": [1.0, 2.0]},
    "steps=0": {"steps": 0},
    "sampler='batched'": {"sampler": "batched"},
    "neighbouring='swap'": {"neighbouring": "swap"},
    "clipping='per_layer'": {"clipping": "per_layer"},
    "microbatch_size=4": {"microbatch_size": 4},
    "seeded='no'": {"seeded": "no"},
    'unit="user" needs unit ids': {"unit": "user"},
    r"delta=0\.0 is not in \(0, 1\)": {"delta": 0},
    r"delta=1\.0 is not in \(0, 1\)": {"account": {"delta": 1}},
    "participation='maybe' is not known": {"participation": "maybe"},
}


@pytest.mark.parametrize("message", BAD_SETTINGS)
def test_bad_settings_are_refused_and_nothing_is_written(message, tmp_path):
    with pytest.raises(InputError, match=message):
        converted(tmp_path, settings=BAD_SETTINGS[message])
    assert not (tmp_path / "run").exists()


def test_everything_that_is_missing_is_asked_for_at_once(tmp_path):
    path = write(tmp_path)
    (tmp_path / "run.json").write_text('{"steps": 30}')
    with pytest.raises(
        InputError,
        match="lacks noise_multiplier, max_grad_norm, sample_rate, sampler, unit, neighb",
    ):
        convert(path, tmp_path / "run.json", tmp_path / "run")


def test_a_directory_in_use_is_refused(tmp_path):
    converted(tmp_path)
    with pytest.raises(InputError, match="already holds the log"):
        converted(tmp_path)


def test_pickles_zip_bombs_and_strange_files_are_refused(tmp_path):
    run_json = tmp_path / "run.json"
    write(tmp_path)
    np.savez(tmp_path / "pickle.npz", norms=np.array([[{}]]), recorded_steps=STEPS)
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("norms.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(129):
            member.write(bytes(1 << 20))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "norms.npz").read_bytes()[:-50])
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    pd.DataFrame({"step0": [0.1]}).to_parquet(tmp_path / "names.parquet")
    pd.DataFrame({"0": [0.1, None]}).to_parquet(tmp_path / "holes.parquet")
    for name, message in {
        "pickle.npz": "without pickles",
        "bomb.npz": "would unpack to 135,266,304 bytes",
        "torn.npz": "is damaged",
        "torn.parquet": "is damaged",
        "names.parquet": "a record is a column named by its step",
        "holes.parquet": "1 missing values",
        "norms.csv": "does not exist",
        "run.json": "neither .parquet nor .npz",
    }.items():
        with pytest.raises(InputError, match=message):
            convert(tmp_path / name, run_json, tmp_path / "run")
    assert not (tmp_path / "run").exists()
