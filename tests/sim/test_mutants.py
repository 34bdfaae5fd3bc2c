"""Every planted bug is found, each on a seed known to find it; `python -m tests.sim.mutants` hunts on many seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, Mutant, hunt


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_dies(mutant: Mutant) -> None:
    found = [
        violation
        for seed in mutant.seeds
        for _, them in hunt(mutant, range(seed, seed + 1), "harsh")
        for violation in them
    ]
    assert any(mutant.expect in violation for violation in found), found
