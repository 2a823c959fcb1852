"""Names of domains and classes in tables and figures: as they are, whatever they hold."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.report import data_report

NAMES = (r"$\nonsense$", "a|b", "Grüße_ü", "$5 and $6")


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A data set whose domains and classes have such names."""
    rng = np.random.default_rng(0)
    y = np.arange(48) % 4
    x = rng.integers(0, 255, (48, 4, 4), np.uint8)
    np.savez(tmp_path / "names.npz", x=x, y=y, domain=np.array(NAMES)[np.arange(48) // 12])
    return str(tmp_path / "names.npz")


def test_strange_names_are_shown(data: str, tmp_path: Path) -> None:
    chosen = config.of(dataset=data, held_out=NAMES[3])
    out = tmp_path / "data.png"
    told = data_report.show(chosen, str(out), 2)
    assert out.stat().st_size
    for name in NAMES[:3]:
        assert name.replace("|", "\\|") in told


@pytest.mark.parametrize("name", ["none", "all", "", "clients"])
def test_words_of_flags_and_tables_are_no_names_of_domains(
    name: str, data: str, tmp_path: Path
) -> None:
    shutil.copy(data, tmp_path / "copy.npz")
    with np.load(tmp_path / "copy.npz") as arrays:
        held = {key: arrays[key] for key in arrays}
    held["domain"][:12] = name
    np.savez(tmp_path / "copy.npz", **held)
    for held_out in ("", "none", "all", NAMES[1]):
        with pytest.raises(UsageError, match=f"has the domain {name!r}"):
            experiment.make(config.of(dataset=str(tmp_path / "copy.npz"), held_out=held_out))
    held["domain"][:] = name
    np.savez(tmp_path / "copy.npz", **held)  # of one domain none is held out
    assert experiment.make(config.of(dataset=str(tmp_path / "copy.npz"))).cells
