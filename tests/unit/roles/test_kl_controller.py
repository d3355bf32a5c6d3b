"""The coefficient of the KL between steps."""

import pytest

from rallypoint.algorithms import KL, AdaptiveKL
from rallypoint.roles.judging import REFERENCE_KL
from rallypoint.roles.kl_controller import KLController
from rallypoint.types import Mean, Metrics

FIRST = KL(coef=0.1, estimator="k3", placement="loss")
ADAPTIVE = AdaptiveKL(target=0.05, horizon=100.0)


def measured(kl):
    return Metrics({REFERENCE_KL: Mean(kl * 8, 8)})


def test_the_coefficient_rises_while_the_policy_is_too_far_and_falls_while_it_is_too_near():
    controller = KLController(FIRST, ADAPTIVE)
    assert controller.adapt(measured(0.5), 50).scalars()["kl/coef"] == 0.1, "that of the step itself"
    assert controller.now.coef == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    controller.adapt(measured(0.049), 100)
    assert controller.now.coef == pytest.approx(0.11 * (1 - 0.02))


@pytest.mark.parametrize("metrics", [Metrics(), measured(float("nan")), measured(float("inf"))])
def test_what_was_not_measured_changes_nothing(metrics):
    controller = KLController(FIRST, ADAPTIVE)
    controller.adapt(metrics, 50)
    assert controller.now == FIRST


@pytest.mark.parametrize(("kl", "adaptive"), [(None, None), (FIRST, None)])
def test_without_a_target_it_is_fixed_and_neither_shown_nor_saved(tmp_path, kl, adaptive):
    controller = KLController(kl, adaptive)
    assert "kl/coef" not in controller.adapt(measured(9.0), 50).scalars()
    controller.save(tmp_path)
    assert controller.now == kl
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_gives_it_back_to_the_last_bit_unless_the_config_has_another_one(tmp_path):
    (tmp_path / "training").mkdir()
    before = KLController(FIRST, ADAPTIVE)
    before.adapt(measured(0.0123), 37)
    before.save(tmp_path)
    again = KLController(FIRST, ADAPTIVE)
    again.restore(tmp_path)
    assert again.now == before.now
    changed = KLController(KL(coef=0.3, estimator="k3", placement="loss"), ADAPTIVE)
    changed.restore(tmp_path)
    assert changed.now.coef == 0.3
