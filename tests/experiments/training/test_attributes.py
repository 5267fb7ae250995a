from dataclasses import replace

import numpy as np
import pytest
import torch

from audits.training.attributes import attribute_knowledge
from audits.training.baseline import fit_without_dp
from audits.training.config import AuditConfig
from audits.training.datasets import DATASETS, load_dataset
from audits.training.models import first_parameters
from indpriv.analysis.attacks.attributes import measure_attribute
from indpriv.attacks import ATTACKS, Material
from indpriv.errors import InputError


@pytest.fixture(scope="module")
def adult():
    return load_dataset("adult")


def part_of(adult, n_train, n_test):
    return replace(
        adult,
        train=adult.train.take(np.arange(len(adult.train)) < n_train),
        test=adult.test.take(np.arange(len(adult.test)) < n_test),
    )


def a_model(dataset):
    config = AuditConfig.from_toml("audits/adult.toml")
    return first_parameters(config.model, dataset.input_shape, 2, 0)


def test_what_is_known_of_an_attribute(adult):
    small = part_of(adult, 300, 400)
    module = a_model(small)
    (known,) = attribute_knowledge(module, small, ["sex"])
    assert known.values == ("Female", "Male")
    assert (known.member.sum(), len(known.truth)) == (300, 500)
    others = known.example_ids[300:]
    for split, ids, of in ((small.train, np.arange(300), known.truth[:300]),
                           (small.test, others, known.truth[300:])):  # fmt: skip
        sex = split.metadata["sex"].to_numpy()[ids]
        np.testing.assert_array_equal(sex == "Male", of == 1)
    # with its true value, an example has the likelihood that the model gives it
    logits = module(torch.from_numpy(small.train.inputs)).double().log_softmax(1)
    expected = logits[torch.arange(300), torch.from_numpy(small.train.targets)]
    found = known.likelihood[np.arange(300), known.truth[:300]]
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6)
    for logs in (known.prior, known.imputed):
        np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1)
    assert np.abs(known.prior - known.imputed).max() > 0.01


def test_imputation_is_logistic_regression_on_the_other_half(adult):
    """Peer: scikit-learn's, with the same penalty, on the test examples that are not scored."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    small = part_of(adult, 50, 600)
    (known,) = attribute_knowledge(a_model(small), small, ["race"])
    where = small.attributes["race"]
    fitting = np.setdiff1d(np.arange(600), known.example_ids[50:])
    assert len(fitting) == 300
    rest = np.delete(small.test.inputs, np.r_[where.columns], axis=1)
    truth = small.test.inputs[:, where.columns].argmax(axis=1)
    peer = linear_model.LogisticRegression(C=1 / (300 * 1e-3), max_iter=5000, tol=1e-8)
    peer.fit(rest[fitting], truth[fitting])
    expected = peer.predict_proba(rest[known.example_ids[50:]])
    np.testing.assert_allclose(np.exp(known.prior[50:])[:, peer.classes_], expected, atol=0.02)


def test_attributes_that_cannot_be_guessed_are_refused(adult):
    small = part_of(adult, 60, 60)
    with pytest.raises(InputError, match="no attribute 'income'"):
        attribute_knowledge(a_model(small), small, ["income"])
    with pytest.raises(InputError, match="40 test examples"):
        attribute_knowledge(a_model(small), part_of(adult, 60, 30), ["sex"])
    inputs = small.train.inputs.copy()
    inputs[3, small.attributes["sex"].columns] = 0
    broken = replace(small, train=replace(small.train, inputs=inputs))
    with pytest.raises(InputError, match="not one-hot"):
        attribute_knowledge(a_model(small), broken, ["sex"])


@pytest.mark.parametrize("name", [name for name, kind in DATASETS.items() if kind.attributes])
def test_the_list_of_attributes_is_that_of_the_data(name):
    dataset = load_dataset(name)
    assert tuple(dataset.attributes) == DATASETS[name].attributes
    for where in dataset.attributes.values():
        np.testing.assert_array_equal(dataset.train.inputs[:500, where.columns].sum(axis=1), 1)


def test_an_audit_file_names_attributes_of_its_data():
    tables = AuditConfig.from_toml("audits/adult.toml").to_dict()
    tables["attacks"] = {"attributes": ["sex"]}
    assert AuditConfig.from_dict(tables).attacks.attributes == ("sex",)
    tables["attacks"] = {"attributes": ["shoe_size"]}
    with pytest.raises(InputError, match="shoe_size"):
        AuditConfig.from_dict(tables)
    tables = AuditConfig.from_toml("audits/digits.toml").to_dict()
    tables["attacks"] = {"attributes": ["sex"]}
    with pytest.raises(InputError, match="sex"):
        AuditConfig.from_dict(tables)


@pytest.mark.slow
def test_a_model_that_overfits_leaks_attributes(adult):
    small = part_of(adult, 1000, len(adult.test))
    tables = AuditConfig.from_toml("audits/adult.toml").to_dict()
    tables["training"] |= {"epochs": 200, "batch_size": 50}
    module = fit_without_dp(AuditConfig.from_dict(tables), small, seed=1)
    known = attribute_knowledge(module, small, ("race", "marital_status", "occupation"))
    for each in known:
        found = measure_attribute(each, "with_imputation", model="non_dp", groups={}).iloc[0]
        assert found.low > 0
        assert found.guessed > found.imputed
    scores = ATTACKS["attributes"].scores(Material(attributes=known))
    inside, outside = (scores.scores[scores.member == side] for side in (True, False))
    assert np.mean(inside) > np.mean(outside) + 0.1
