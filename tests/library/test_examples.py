"""What the README and examples/ show runs as it stands there."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LIBRARY = (ROOT / "docs" / "library.md").read_text()
CHANCE = {
    "own_algorithm": 0.1,
    "front_door": 0.5,
    "own_arrays": 0.5,
    "own_network": 0.1,
    "own_equinox": 0.1,
    "load_and_evaluate": 0.1,
    "fednova": 0.1,
    "best_responses": 0.1,
}
NEEDS = {"own_equinox": "equinox"}  # a package that is not installed with the others


@pytest.mark.slow
def test_the_snippets_of_the_readme_and_the_library_run() -> None:
    namespace: dict = {"__name__": "readme"}
    for snippet in re.findall(r"```python\n(.*?)```", README + LIBRARY, re.DOTALL):
        exec(compile(snippet, "snippets", "exec"), namespace)
    np.testing.assert_allclose(namespace["s"], 12)  # 2 (w - 1) w, summed
    assert namespace["below"] == pytest.approx(0.9, abs=0.05)
    assert namespace["by_rate"].max() > 0.7
    assert namespace["best"].score > 0.7
    assert namespace["scores"].score[0] > 0.7
    drawn = namespace["pretrained"].init(jax.random.key(0), np.ones((1, 8)))
    body = jax.tree.leaves(drawn.params.body)
    trained = jax.tree.leaves(namespace["tuned"].network().params.body)
    for start, end in zip(body, trained, strict=True):
        np.testing.assert_array_equal(start, end)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(CHANCE)


@pytest.mark.parametrize("name", slow.after(1, CHANCE))
def test_an_example_learns(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    accuracies = np.concatenate([np.ravel(part) for part in _parts(main())])
    assert (accuracies > min(0.9, 3 * CHANCE[name])).all(), accuracies


def _parts(told: object) -> tuple:
    return told if isinstance(told, tuple) else (told,)


@pytest.mark.slow
def test_the_core_does_without_what_the_extra_brings() -> None:
    """A kernel's snippet and a federation, in a process that can import none of it."""
    snippets = re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL)
    snippet = next(snippet for snippet in snippets if "fedipg.invariance" in snippet)
    extra = ("array_record", "lime", "matplotlib", "PIL", "sklearn", "tabulate", "tqdm")
    extra = (*extra, "hypothesis", "pytest", "scipy")
    lines = [
        "import sys",
        *(f"sys.modules[{name!r}] = None" for name in (*extra, "tensorflow_datasets")),
        "import fedjax_inv",
        snippet,
        "from fedjax_inv import laws",
        "from fedjax_inv.algorithms import fedavg",
        "laws.check(fedavg.fedavg, laws=['a_round_can_be_traced'])",
        "from fedjax_inv.data import dsprites, environments, federation, partitions, sources",
        "assert fedjax_inv.__version__ and s == 12",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)
