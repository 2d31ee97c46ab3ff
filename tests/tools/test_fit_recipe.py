"""The fit of the recipe: dials turn what they name towards their target, and the check objects to what is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.corpus.recipe import Recipe
from loadgen.corpus.statistics import TARGETS
from tools import fit_recipe
from tools.fit_recipe import DIALS, HOUR, TRAINING_SEEDS, changed, check, fit, get, moved

ROOT = Path(fit_recipe.__file__).resolve().parents[1]
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
    assert [row.complaint for row in check(Recipe(), (0, 1, 2)) if row.complaint] == [sentence]
    monkeypatch.setattr(fit_recipe, "starmap", lambda function, jobs: [PUBLISHED for _ in jobs])
    assert not any(row.complaint for row in check(Recipe(), (0, 1, 2)))


def test_the_documentation_has_the_table_of_these_targets() -> None:
    """Its figures take minutes: here only that they are of today's targets, and within bounds."""
    text = (ROOT / "docs" / "agentx.md").read_text()
    table = text.split(fit_recipe.OPENING)[1].split(fit_recipe.CLOSING)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:2] for row in rows] == [[t.name, f"{t.published:,.6g}"] for t in (*TARGETS, *HOUR)]
    for row, target in zip(rows, (*TARGETS, *HOUR)):
        median, off = float(row[2].replace(",", "")), float(row[3].rstrip("%")) / 100
        assert off == pytest.approx(median / target.published - 1, abs=0.001)
        assert target.tolerance is None or abs(off) <= target.tolerance + 0.0005


def test_a_table_goes_between_its_markers() -> None:
    text = f"before\n{fit_recipe.OPENING}\nold\n{fit_recipe.CLOSING}\nafter\n"
    assert fit_recipe.refreshed(text, "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="must have one table between its markers"):
        fit_recipe.refreshed("nothing", "new")


def test_the_default_corpus_gives_the_profiled_hour() -> None:
    """The seed that runs have by default, over an hour of the closed loop."""
    figures = fit_recipe.hour_profile(fit_recipe.SyntheticTraces(393, 42))
    for target in HOUR:
        assert figures[target.name] == pytest.approx(target.published, rel=target.tolerance), target.name
