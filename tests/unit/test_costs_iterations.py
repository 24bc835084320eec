"""Whole iterations from a few measured ones, and the fit beneath."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hwaware.costs import IterationModel, fit_iterations
from hwaware.costs.curves import fit_positive
from hwaware.costs.iterations import read_iterations
from hwaware.errors import RecordError, UnusableInputError

RECORDED = Path(__file__).parents[2] / "profiling" / "recorded"


def test_a_tenth_predicts_the_rest():
    configurations, seconds = read_iterations(RECORDED / "a100_iterations.csv")
    measured = np.array(seconds)
    assert len(measured) == 1440
    fit = np.arange(0, len(measured), 10)
    rest = np.setdiff1d(np.arange(len(measured)), fit)
    model = fit_iterations([configurations[i] for i in fit], measured[fit])
    errors = np.abs(model.predict_s([configurations[i] for i in rest]) / measured[rest] - 1)
    assert errors.mean() < 0.08


def test_faster_parts_never_make_iterations_longer():
    configurations, _ = read_iterations(RECORDED / "a100_iterations.csv")
    before = IterationModel().predict_s(configurations)
    for name in ("flops_per_s", "memory_bytes_per_s", "tensor_bytes_per_s", "data_bytes_per_s"):
        faster = IterationModel(**{name: 2 * getattr(IterationModel(), name)}).predict_s(configurations)
        assert np.all(faster <= before)
    for name in ("launch_s", "group_launch_s", "microbatch_s", "hop_s", "iteration_s"):
        faster = IterationModel(**{name: getattr(IterationModel(), name) / 2}).predict_s(configurations)
        assert np.all(faster <= before)


def test_a_model_is_found_again():
    configurations, _ = read_iterations(RECORDED / "a100_iterations.csv")
    truth = IterationModel(flops_per_s=9e13, launch_s=4e-3, data_bytes_per_s=5e10)
    chosen = configurations[::12]
    found = fit_iterations(chosen, truth.predict_s(chosen))
    errors = found.predict_s(configurations) / truth.predict_s(configurations) - 1
    assert np.abs(errors).max() < 0.02


def test_what_the_data_leave_open_stays_where_it_started():
    fitted = fit_positive(lambda p: p[0] * np.ones(4), np.full(4, 3.0), np.array([1.0, 7.0]))
    assert fitted == pytest.approx([3.0, 7.0], rel=1e-3)


def test_unusable_measurements_are_refused(tmp_path):
    with pytest.raises(UnusableInputError, match="as many times"):
        fit_iterations([], [])
    with pytest.raises(UnusableInputError, match="above 0"):
        fit_iterations([{}], [0.0])
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RecordError, match="iteration_s"):
        read_iterations(path)
