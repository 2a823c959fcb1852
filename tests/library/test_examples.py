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
}
NEEDS = {"own_equinox": "equinox"}  # a package that is not installed with the others


@pytest.mark.slow
def test_the_snippets_of_the_readme_run_one_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README + LIBRARY, re.DOTALL)
    assert len(snippets) > 4
    namespace: dict = {"__name__": "readme"}
    for snippet in snippets:
        exec(compile(snippet, "snippets", "exec"), namespace)
    np.testing.assert_allclose(namespace["s"], 12)  # 2 (w - 1) w, summed
    first, *lines = capsys.readouterr().out.splitlines()
    of_fedavg, of_fedipg = (float(number) for number in re.findall(r"[\d.]+", first))
    assert of_fedavg < 0.15  # that of the cue in the third hospital
    assert of_fedipg > 0.7  # that of the sign
    loss, *others = (float(re.findall(r"[\d.]+", line)[-1]) for line in lines)
    assert float(re.findall(r"accuracy ([\d.]+)", lines[0])[0]) > 0.7
    assert loss < 0.7  # below that of guessing
    assert len(others) == 8
    assert np.mean(others) > 0.6


def test_the_snippets_on_networks_run_one_after_the_other() -> None:
    text = (ROOT / "docs" / "networks.md").read_text()
    namespace: dict = {"__name__": "networks"}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(snippet, "snippets", "exec"), namespace)
    model, variables = namespace["pretrained"], namespace["variables"]
    x, mask = np.ones((3, 8), np.float32), np.ones(3, bool)
    features, _ = model.encode(variables.params.body, variables.stats.body, x, mask, False)
    outputs, _ = model.decode(variables.params.head, variables.stats.head, features, mask, False)
    np.testing.assert_allclose(outputs, np.repeat(features.sum(1)[:, None], 2, 1), rtol=1e-5)
    assert len(namespace["algorithm"].exchanges) == 1
    drawn = namespace["with_head"].init(jax.random.key(0), x).params
    assert [leaf.shape for leaf in jax.tree.leaves(drawn.head)] == [(2,), (16, 2)]


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
