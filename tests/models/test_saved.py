"""Files of arrays by names of our own: what is written comes back, and nothing else does."""

import struct
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_inv.checks import UsageError
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
    saved.save(path, tree(), {"task": "classes"})
    assert saved.about(path) == {"task": "classes"}
    assert {"params/body/w", "params/body/scale", "stats/body/count"} < {*load_file(path)}
    for like in (tree(), jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree()))):
        got = saved.load(path, like)
        chex.assert_trees_all_equal(got, tree())
        chex.assert_trees_all_equal_dtypes(got, tree())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(w=np.zeros((3, 5))), "w"),
        (dict(w=np.zeros((5, 3), np.int32)), "w"),
        (dict(v=1.0), "v"),
    ],
)
def test_another_network_is_told(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    """Another shape, another kind of numbers, an array that is lacking, and one too many."""
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    saved.save(path, tree())
    saved.save(other, tree(**changes))
    for file, like in ((path, tree(**changes)), (other, tree())):
        with pytest.raises(UsageError, match=f"params/body/{name}"):
            saved.load(file, jax.tree.map(jnp.asarray, like))


def test_numbers_of_another_width_are_converted_and_do_not_wrap(tmp_path: Path) -> None:
    path, like = tmp_path / "a.safetensors", {"w": jnp.zeros(2, jnp.float16)}
    saved.save(path, {"w": jnp.array([1.5, 2.0])})
    assert saved.load(path, like)["w"].dtype == jnp.float16
    like = {"count": jnp.zeros(2, jnp.uint8)}
    saved.save(path, {"count": jnp.array([44, 255])})
    assert saved.load(path, like)["count"].tolist() == [44, 255]
    saved.save(path, {"count": jnp.array([300, 0])})  # would be 44
    with pytest.raises(UsageError, match="count"):
        saved.load(path, like)


def of_8_bits() -> bytes:
    header = b'{"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}'
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize("content", [None, b"", b'\x08\0\0\0\0\0\0\0{"a": 1}', of_8_bits()])
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, content: bytes | None
) -> None:
    """There is none, an empty one, a damaged one, and one of 8-bit floats."""
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        saved.load(path, tree())
    assert "\n" not in str(error.value)
