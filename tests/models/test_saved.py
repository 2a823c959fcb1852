"""Files of arrays by names of our own: what is written comes back, and nothing else does."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv.models import saved
from fedjax_inv.types import Halves, Variables


def tree(**changes: Any) -> Variables:
    """With what is seldom: a scalar, an array without elements, other types, a part of another."""
    rng = np.random.default_rng(0)
    body = {"w": rng.normal(size=(5, 2, 3)).astype(np.float32)[:, 1], "scale": np.float32(2)}
    head = {"b": jnp.arange(3, dtype=jnp.bfloat16), "none": np.zeros((0, 4), np.float32)}
    return Variables(Halves(body | changes, head), Halves({"count": np.int32(7)}, {}))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    shapes = saved.save(path, tree())
    assert shapes["params/body/w"] == [5, 3]
    assert shapes["params/body/scale"] == []
    assert shapes["stats/body/count"] == []
    for like in (tree(), jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree()))):
        got = saved.load(path, like)
        chex.assert_trees_all_equal(got, tree())
        chex.assert_trees_all_equal_dtypes(got, tree())


def test_the_file_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    saved.save(path, tree())
    less = tree()._replace(params=Halves({"scale": np.float32(0)}, {"b": jnp.zeros(3)}))
    for like in (tree(w=np.zeros((3, 5))), tree(v=np.zeros(2)), less):
        with pytest.raises(ValueError, match=r"params/body/[wv]"):
            saved.load(path, like)


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    saved.save(path, {"count": jnp.array([1.7, 2.0])})
    with pytest.raises(ValueError, match="count"):
        saved.load(path, {"count": jnp.zeros(2, jnp.int32)})
    assert saved.load(path, {"count": jnp.zeros(2, jnp.float16)})["count"].dtype == jnp.float16
