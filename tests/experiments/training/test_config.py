import copy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from audits.training.config import AuditConfig
from indpriv.errors import InputError
from indpriv.norm_log.fields import RecordingPolicy

AUDITS = Path(__file__).parents[3] / "audits"
SMALL = {
    "name": "small",
    "data": {"dataset": "adult"},
    "model": {"architecture": "mlp"},
    "training": {
        "epochs": 1,
        "batch_size": 100,
        "learning_rate": 0.5,
        "max_grad_norm": 1,
        "delta": 1e-5,
        "target_epsilon": 3,
    },
    "recording": {"every": 1},
    "checkpoints": {"every": "epoch"},
    "audit": {"groups": ["label", "race"]},
}


def changed(section, key, value):
    tables = copy.deepcopy(SMALL)
    if section is None:
        tables[key] = value
    else:
        tables[section][key] = value
    return tables


def test_audit_files_are_read_and_written_back():
    files = sorted(AUDITS.glob("*.toml"))
    ran = {"adult", "cifar10", "digits", "mnist", "utkface_gender", "utkface_age"}
    not_run = {"cifar10_wrn16_4", "cifar10_resnet20", "mnist_resnet20"}
    assert ran | not_run <= {path.stem for path in files}
    for path in files:
        config = AuditConfig.from_toml(path)
        assert config.name == path.stem
        assert path.read_text().startswith("# NOT RUN: for a GPU.") == (path.stem in not_run)
        tables = config.to_dict()
        assert AuditConfig.from_dict(tables) == config
        for section, values in tomllib.loads(path.read_text()).items():
            if isinstance(values, dict):  # nothing in the file is lost or changed
                assert {key: tables[section][key] for key in values} == values


def test_the_adult_audit_is_the_demo_that_was_promised():
    config = AuditConfig.from_toml(AUDITS / "adult.toml")
    training = config.training
    assert (training.epochs, training.target_epsilon, training.delta) == (20, 3.0, 1e-5)
    assert -(-32561 // training.batch_size) == 34
    assert config.recording.every == 1
    assert {"label", "race", "sex"} <= set(config.audit.groups)


@pytest.mark.parametrize("longest", ["epoch", "2 epochs", 34])
def test_the_recording_section_takes_the_words_of_a_policy(longest):
    words = {
        "every": 5,
        "growth": 1.5,
        "longest": longest,
        "batch_norms": True,
        "reference_examples": 20,
        "first": 4,
    }
    tables = copy.deepcopy(SMALL)
    tables["recording"] = {**words, "rounding": 0.02}
    assert AuditConfig.from_dict(tables).recording.to_policy() == RecordingPolicy(**words)
    assert AuditConfig.from_dict(SMALL).recording.to_policy() == RecordingPolicy(every=1)


def test_whole_numbers_become_floats_where_floats_are_meant():
    config = AuditConfig.from_dict(SMALL)
    assert isinstance(config.training.max_grad_norm, float)
    assert config.audit.groups == ("label", "race")


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        (
            "training",
            "epochs",
            0,
            "epochs = 0 is not accepted; it takes a whole number of at least 1",
        ),
        ("training", "epochs", 1.5, "epochs = 1.5"),
        ("training", "epochs", True, "epochs = True"),
        ("training", "epochs", "20", "epochs = '20'"),
        ("training", "batch_size", -1, "batch_size = -1"),
        ("training", "learning_rate", 0, "learning_rate = 0 .* above 0"),
        ("training", "learning_rate", float("nan"), "learning_rate = nan"),
        ("training", "learning_rate", float("inf"), "learning_rate = inf"),
        ("training", "momentum", 1.0, "momentum = 1.0 .* of at least 0 and below 1"),
        ("training", "momentum", False, "momentum = False"),
        ("training", "max_grad_norm", -1, "max_grad_norm = -1"),
        ("training", "delta", 0, "delta = 0 .* above 0 and below 1"),
        ("training", "delta", 1, "delta = 1 "),
        ("training", "target_epsilon", 0, "target_epsilon = 0"),
        ("training", "noise_multiplier", 1.0, "both target_epsilon and noise_multiplier"),
        ("training", "non_private_baseline", 1, "non_private_baseline = 1 .* true or false"),
        ("training", "non_private_learning_rate", 0.1, "without a baseline"),
        (
            "training",
            "non_private_weight_decay",
            0.0,
            "non_private_weight_decay .* without a baseline",
        ),
        ("training", "grad_sample_mode", "ew", "'hooks', 'ghost'"),
        ("training", "max_physical_batch_size", 0, "max_physical_batch_size = 0"),
        ("training", "epoch", 3, "has the key 'epoch', which is not known; did you mean 'epochs'"),
        ("training", "seed", 3, "has the key 'seed', which is not known"),
        ("data", "dataset", "imagenet", "dataset = 'imagenet' .* 'adult', .*'digits'"),
        ("data", "dataset", 3, "dataset = 3"),
        (
            "data",
            "unit_column",
            "family",
            "unit_column='family' is not a column of adult, which has race, sex, age_band",
        ),
        (
            "data",
            "unit_column",
            "race",
            "target_epsilon is of one row, and .* unit_column makes units of several",
        ),
        ("data", "max_rows_per_unit", 2, "max_rows_per_unit is given without unit_column"),
        ("model", "architecture", "transformer", "architecture = 'transformer'"),
        ("model", "hidden", [], "hidden = .. .* list of at least 1"),
        ("model", "hidden", [64, 0], "hidden = 0"),
        ("model", "hidden", 64, "hidden = 64 .* a list"),
        ("model", "activation", "gelu", "'tanh', 'relu'"),
        ("recording", "every", 0, "every = 0 .* or one of 'epoch', 'once'"),
        ("recording", "first", -1, "first = -1"),
        ("checkpoints", "every", "once", "every = 'once'"),
        ("recording", "every", "epochs", "every = 'epochs'"),
        ("recording", "every", True, "every = True"),
        ("recording", "rounding", 1.5, "rounding = 1.5"),
        ("recording", "rounding", 1e-6, "finer than two bytes"),
        ("recording", "rounding_mode", "down", "'up', 'nearest'"),
        ("recording", "reference_examples", -1, "reference_examples = -1"),
        ("recording", "growth", 0.5, "growth = 0.5 .* of at least 1"),
        ("recording", "growth", 11, r"growth=11.0 is not in \[1, 10\]"),
        ("recording", "longest", 0, "longest = 0"),
        ("recording", "longest", 50, "longest=50 limits gaps that do not grow"),
        ("recording", "batch_norms", 1, "batch_norms = 1 .* true or false"),
        ("training", "individual_clipping", "yes", "individual_clipping = 'yes' .* true or false"),
        ("training", "clip_headroom", 2, "clip_headroom = 2"),
        ("training", "clip_headroom", 0.1, "clip_headroom is given without individual clipping"),
        ("checkpoints", "every", 2.0, "every = 2.0"),
        ("audit", "groups", ["label", "label"], "has a name twice; list each once"),
        ("audit", "groups", ["zip code"], "groups = 'zip code'"),
        (
            "audit",
            "groups",
            ["income"],
            "groups has 'income'; the data set adult has 'label', 'race', 'sex', 'age_band'",
        ),
        ("audit", "groups", "label", "a list"),
        ("audit", "tolerance", 0.01, r"\[audit\] has the key 'tolerance', which is not known"),
        (None, "name", "../../etc", "name = '../../etc'"),
        (None, "name", 3, "name = 3"),
        (None, "data", "adult", r"data = 'adult' is not a table; write it as \[data\]"),
        (None, "traning", {}, "did you mean 'training'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_accepted(section, key, value, says):
    with pytest.raises(InputError, match=says) as caught:
        AuditConfig.from_dict(changed(section, key, value))
    if section:
        assert f"[{section}]" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "former"), [("training", "non_dp_twin"), ("recording", "free_records")]
)
def test_former_names_of_keys_are_refused(section, former):
    with pytest.raises(InputError, match=rf"\[{section}\] .*{former}"):
        AuditConfig.from_dict(changed(section, former, True))


def test_known_participation_is_of_no_added_or_removed_example():
    tables = changed("audit", "participation", "known")
    tables["audit"]["neighbouring"] = "add_remove"
    with pytest.raises(InputError, match=r"\[audit\].*who is in the data; say"):
        AuditConfig.from_dict(tables)


def test_the_json_schema_accepts_the_audit_files_and_refuses_unknown_keys():
    validator = jsonschema.Draft202012Validator(AuditConfig.json_schema())
    for path in AUDITS.glob("*.toml"):
        validator.validate(tomllib.loads(path.read_text()))
    for tables in (changed("training", "seed", 3), changed("training", "epochs", 0)):
        assert not validator.is_valid(tables)


def test_missing_keys_and_sections_are_named():
    tables = copy.deepcopy(SMALL)
    del tables["training"]["learning_rate"], tables["training"]["delta"]
    with pytest.raises(InputError, match=r"\[training\] lacks learning_rate, delta"):
        AuditConfig.from_dict(tables)
    tables = copy.deepcopy(SMALL)
    del tables["name"], tables["recording"]
    with pytest.raises(InputError, match="lacks name, recording"):
        AuditConfig.from_dict(tables)
    tables = copy.deepcopy(SMALL)
    del tables["training"]["target_epsilon"]
    with pytest.raises(InputError, match="neither target_epsilon nor noise_multiplier"):
        AuditConfig.from_dict(tables)
    tables = copy.deepcopy(SMALL)
    del tables["audit"]
    assert AuditConfig.from_dict(tables).audit.groups == ("label",)


def test_options_of_an_architecture_are_refused_elsewhere():
    for key, value in (
        ("hidden", [8]),
        ("activation", "relu"),
        ("affine", False),
        ("weight_standardisation", True),
    ):
        tables = changed("model", key, value)
        tables["model"]["architecture"] = "tanh_cnn"
        with pytest.raises(InputError, match=f"{key} is for architecture"):
            AuditConfig.from_dict(tables)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(InputError, match=r"mine\.toml does not exist"):
        AuditConfig.from_toml(path)
    path.write_text('name = "x\n')
    with pytest.raises(InputError, match=r"mine\.toml cannot be read as TOML: .*line 1"):
        AuditConfig.from_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"mine\.toml cannot be read as TOML"):
        AuditConfig.from_toml(path)
    path.write_text((AUDITS / "adult.toml").read_text().replace("epochs = 20", "epochs = -20"))
    with pytest.raises(InputError, match=r"mine\.toml: \[training\] epochs = -20"):
        AuditConfig.from_toml(path)
    with pytest.raises(InputError, match="cannot be read as TOML"):
        AuditConfig.from_toml(tmp_path)
