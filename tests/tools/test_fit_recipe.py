"""The fit of the recipe: dials turn what they name towards their target, and the check objects to what is off."""

from __future__ import annotations

import pytest

from loadgen.corpus import TARGETS
from loadgen.recipe import Recipe
from tools import fit_recipe
from tools.fit_recipe import DIALS, HOUR, TRAINING_SEEDS, changed, check, fit, get, moved

PUBLISHED = {target.name: float(target.published) for target in (*TARGETS, *HOUR)}


def test_every_dial_has_a_parameter_and_a_target() -> None:
    names = {target.name for target in (*TARGETS, *HOUR)}
    for dial in DIALS:
        assert dial.target in names
        value = get(Recipe(), dial.parameter)
        assert get(changed(Recipe(), dial.parameter, 2 * value), dial.parameter) == 2 * value
        assert get(moved(Recipe(), dial.parameter, 0.1), dial.parameter) > value
    assert len({dial.parameter for dial in DIALS}) == len(DIALS)


def test_a_fit_turns_a_parameter_until_its_target_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def measure(recipe: Recipe, seed: int) -> dict[str, float]:
        seeds.append(seed)
        return PUBLISHED | {"output p50, main": 2 * recipe.output.median}

    monkeypatch.setattr(fit_recipe, "measure", measure)
    fitted = fit(Recipe(), 12)
    assert fitted.output.median == pytest.approx(308, rel=0.01)
    assert get(fitted, "gap_s.1") == get(Recipe(), "gap_s.1")
    assert set(seeds) == set(TRAINING_SEEDS)


@pytest.mark.parametrize(
    ("name", "factors", "sentence"),
    [
        ("input p50", (1.12, 1.12, 1.12), "input p50: median off by +12.0%, allowed 10.0%"),
        ("input p99", (1.0, 1.0, 0.7), "input p99: one seed off by -30.0%, allowed 25%"),
        ("hour: input p90", (1.2, 1.2, 1.2), "hour: input p90: median off by +20.0%, allowed 15.0%"),
    ],
)
def test_the_check_objects(
    name: str, factors: tuple[float, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(recipe: Recipe, seed: int) -> dict[str, float]:
        return PUBLISHED | {name: PUBLISHED[name] * factors[seed]}

    monkeypatch.setattr(fit_recipe, "measure", measure)
    monkeypatch.setattr(fit_recipe, "starmap", lambda function, jobs: [measure(*job) for job in jobs])
    assert check(Recipe(), (0, 1, 2)) == [sentence]
    monkeypatch.setattr(fit_recipe, "starmap", lambda function, jobs: [PUBLISHED for _ in jobs])
    assert check(Recipe(), (0, 1, 2)) == []


def test_the_hour_is_that_of_the_closed_loop() -> None:
    """A small corpus and few lanes give requests of both kinds and a hit rate of a prefix cache."""
    figures = fit_recipe.hour_profile(fit_recipe.SyntheticTraces(12, 4), concurrency=6)
    assert set(figures) == {target.name for target in HOUR}
    assert 0.8 < figures["hour: prefix-cache hit"] < 1
    assert 30_000 < figures["hour: input p50"] < 300_000
