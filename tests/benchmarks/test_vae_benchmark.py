"""The benchmark of latent-variable models: its numbers, and none for wrong gradients."""

import importlib

from flipgrad.estimators import PSA

vae = importlib.import_module("flipgrad.benchmarks.vae")


def test_times_and_variances_are_given_if_psa_is_right(monkeypatch):
    monkeypatch.delenv("FLIPGRAD_DATA", raising=False)
    for name, value in (("STEPS", 2), ("REPEATS", 1), ("DRAWS", 2), ("BATCH", 5)):
        monkeypatch.setattr(vae, name, value)
    result = vae.vae()
    assert result["data"] == "digits"
    assert result["psa_over_st"] > 0
    assert result["disarm_variance_over_psa"] > 1
    assert result["psa_relative_error"] < 1e-3
    assert {"arm", "arms", "reinforce", "muprop", "rebar", "relax", "double_cv", "bitflip", "leg", "zgr"} < set(
        result["seconds"]
    )
    monkeypatch.setattr(vae, "_estimators", lambda pixels, start: {"st": vae.ST(), "psa": PSA(), "disarm": vae.DisARM()})
    monkeypatch.setattr(vae, "_error", lambda model, x: 0.5)
    wrong = vae.vae()
    assert wrong["psa_over_st"] is None
    assert wrong["disarm_variance_over_psa"] is None
