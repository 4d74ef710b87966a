"""Digests of a model's weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvledger.audit.engines.content.weight_digest import WeightDigest, is_whole  # noqa: E402


def model(dtype: str = "float32"):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 32), torch.nn.Linear(32, 8, bias=False)]
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_changed_number_is_seen_by_the_digest_of_all(dtype):
    weights = model(dtype)
    digest = WeightDigest(weights)

    assert digest.is_equal() is True
    weights[0].weight.data[3, 5] += 1
    assert digest.is_equal() is False
    assert digest.is_equal() is True


@pytest.mark.parametrize("dim", [0, 1])
def test_exchanged_rows_or_columns_are_seen(dim):
    weights = model()
    digest = WeightDigest(weights)
    weights[0].weight.data = weights[0].weight.data.flip(dim)

    assert digest.is_equal() is False


def test_a_replaced_parameter_with_equal_numbers_is_equal():
    weights = model()
    digest = WeightDigest(weights)
    weights[0].weight = torch.nn.Parameter(weights[0].weight.detach().clone())

    assert digest.is_equal() is True


def test_a_training_step_is_seen_by_the_samples():
    weights = model()
    digest = WeightDigest(weights)
    optimizer = torch.optim.Adam(weights.parameters(), lr=1e-6)
    weights(torch.ones(1, 64)).sum().backward()

    assert digest.looks_equal()
    optimizer.step()
    assert not digest.looks_equal()
    assert digest.looks_equal()
    assert digest.is_equal() is True


def test_a_tensor_that_cannot_be_read_makes_equality_unknown():
    weights = model()
    weights[0].weight.data = torch.empty(0)
    digest = WeightDigest(weights)

    assert digest.is_equal() is None
    weights[1].weight.data *= 2
    assert digest.is_equal() is False


def test_a_digest_of_what_no_worker_splits_reads_no_other_parameter():
    weights = model()
    weights[0].weight.output_dim = 0
    weights[1].weight.data = torch.empty(0)
    digest = WeightDigest(weights, is_whole)

    weights[0].weight.data += 1
    assert digest.is_equal() is True
    weights[0].bias.data += 1
    assert digest.is_equal() is False
