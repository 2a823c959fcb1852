"""Placement on several devices: each holds all data, or only the data of the clients it owns.

Axis letters: R runs, k devices, N shards, l rows of one device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_inv.devices import axis as axes
from fedjax_inv.devices.ownership import clients_per_device, first_client, owner
from fedjax_inv.types import Array, Examples, Tree

T = TypeVar("T")

_WHOLE = PartitionSpec()


class ClientShards(NamedTuple):
    """The shards of the clients of each run: a `Federation` without its examples.

    All runs share the examples.
    """

    order: Array  # [R, L]; placed by owner: [k, R, l]
    start: Array  # [R, C]
    size: Array  # [R, C]


class SharedExamples(NamedTuple):
    """Shards that no training client owns, such as the test's; each device may take a part."""

    order: Array  # [R, L]; placed in parts: [k, R, l]
    start: Array  # [R, N]; placed in parts: [R, k N], device after device
    size: Array  # [R, N]; placed in parts: [R, k N]


def is_shards(node: Tree) -> bool:
    """Return whether a node of a tree of inputs is `ClientShards` or `SharedExamples`."""
    return isinstance(node, ClientShards | SharedExamples)


class Layout(NamedTuple):
    """The devices that share the clients, and what lies on each of them."""

    mesh: Mesh  # of one axis
    own: bool  # whether only the data and states of its own clients lie on a device

    @property
    def num_parts(self) -> int:
        """The number of parts of `SharedExamples`."""
        return self.mesh.size if self.own else 1

    def axis(self, inner: axes.Axis) -> axes.Axis:
        """Return the axis that assigns slots to the devices; each folds its own by `inner`."""
        return (axes.owned if self.own else axes.sharded)(self.mesh.axis_names[0], inner)

    def clients_per_device(self, num_clients: int) -> int:
        """Return how many clients' states lie on a device."""
        return clients_per_device(num_clients, self.num_parts)

    @property
    def client_spec(self) -> PartitionSpec:
        """The placement of clients' states [R, C, ...]."""
        return PartitionSpec(None, self.mesh.axis_names[0]) if self.own else _WHOLE

    @property
    def _device_spec(self) -> PartitionSpec:
        """The placement of arrays [k, ...] that differ from device to device."""
        return PartitionSpec(self.mesh.axis_names[0])

    def over(
        self, fn: Callable[..., Tree], others: tuple[Tree, ...], results: Tree
    ) -> Callable[..., Tree]:
        """Return fn(data, inputs, *others) run on every device, with data and inputs as placed.

        Args:
          fn: a function of the arrays on one device.
          others: where the other arguments lie, a tree of `PartitionSpec` for each.
          results: where the results lie, a tree of `PartitionSpec`.
        """
        if not self.own:
            return axes.over(self.mesh, fn)

        def on_device(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            return fn(*local_view(data, inputs), *rest)

        def run(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            in_specs = (self._device_spec, self._specs(inputs), *others)
            return axes.over(self.mesh, on_device, in_specs, results)(data, inputs, *rest)

        return run

    def _specs(self, inputs: Tree) -> Tree:
        def of(node: Tree) -> Tree:
            return type(node)(self._device_spec, _WHOLE, _WHOLE) if is_shards(node) else _WHOLE

        return jax.tree.map(of, inputs, is_leaf=is_shards)

    def place(
        self,
        data: Examples,
        inputs: T,
        put: Callable[[Tree, NamedSharding], Tree] | None = None,
    ) -> tuple[Examples, T]:
        """Place data and inputs on the devices, as the program expects them.

        Args:
          data: M examples, whole and equal on each process.
          inputs: a tree with `ClientShards` and `SharedExamples` in it, equal on each process.
          put: how to place a tree under a sharding; by default `jax.device_put`.

        Returns:
          (data, inputs), their leaves placed. With `own`, data are [k, m, ...]: for each device the
          examples that its shards name, padded to the largest number on a device.
        """
        put = put or _put
        whole = NamedSharding(self.mesh, _WHOLE)
        if not self.own:
            return put((data, inputs), whole)
        rows, inputs = _split(len(data.y), inputs, self.mesh.size)
        by_device = NamedSharding(self.mesh, self._device_spec)

        def placed(node: Tree) -> Tree:
            if not is_shards(node):
                return put(node, whole)
            return type(node)(put(node.order, by_device), *put((node.start, node.size), whole))

        local = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)
        return put(local, by_device), jax.tree.map(placed, inputs, is_leaf=is_shards)

    def replicate(self, tree: T) -> T:
        """Place a tree of arrays, equal on each process, whole on every device."""
        return _put(tree, NamedSharding(self.mesh, _WHOLE))

    def place_clients(self, states: Tree) -> Tree:
        """Place clients' states [R, C, ...], equal on each process, as the program expects them."""

        def padded(leaf: Array) -> np.ndarray:
            num_clients = leaf.shape[1]
            more = self.clients_per_device(num_clients) * self.num_parts - num_clients
            return np.pad(np.asarray(leaf), [(0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 2))

        return _put(jax.tree.map(padded, states), NamedSharding(self.mesh, self.client_spec))

    def gather_clients(self, states: Tree, num_clients: int) -> Tree:
        """Return clients' states [R, C, ...], the same for every layout and number of devices.

        Args:
          states: the states that the program returned, or their shapes.
          num_clients: C.

        Returns:
          The states, on the host if they differ between devices; shapes if `states` are shapes.
        """
        if not self.own:
            return states

        def leaf(array: Array) -> Tree:
            if isinstance(array, jax.ShapeDtypeStruct):
                shape = array.shape[0], num_clients, *array.shape[2:]
                return jax.ShapeDtypeStruct(shape, array.dtype)
            if not array.is_fully_addressable:
                array = multihost_utils.process_allgather(array, tiled=True)
            return np.asarray(array)[:, :num_clients]

        return jax.tree.map(leaf, states)


def _put(tree: T, where: NamedSharding) -> T:
    """Place a tree of arrays, equal on each process, under a sharding."""

    def leaf(array: Array) -> Array:
        if isinstance(array, jax.Array) and array.sharding == where:
            return array
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
        return jax.device_put(np.asarray(array), where)

    return jax.tree.map(leaf, tree)


def local_view(data: Examples, inputs: T) -> tuple[Examples, T]:
    """Return the part of one device of data and inputs, as placed with `own`.

    Args:
      data: examples that `Layout.place` has placed with `own`, [1, m, ...] inside `over`. Outside
        they are [k, m, ...], and the first device's are taken.
      inputs: a tree whose shards have an order [1, R, l] or [k, R, l].

    Returns:
      (data [m, ...], inputs whose shards have an order [R, l]).
    """

    def local(node: Tree) -> Tree:
        return node._replace(order=node.order[0]) if is_shards(node) else node

    mine = jax.tree.map(lambda leaf: leaf[0], data)
    return mine, jax.tree.map(local, inputs, is_leaf=is_shards)


class _Rows(NamedTuple):
    """The rows of each run's shards, one shard after the other, cut between devices."""

    rows: list[np.ndarray]  # R times [size.sum()]
    cuts: np.ndarray  # [R, k + 1], where the rows of each device begin, and the end


def _split(num_examples: int, inputs: T, num_devices: int) -> tuple[np.ndarray, T]:
    """Return (rows of the examples on each device [k, m], inputs with their shards by device)."""
    nodes, structure = jax.tree.flatten(inputs, is_leaf=is_shards)
    nodes = [
        _cut(node, num_devices) if isinstance(node, SharedExamples) else node for node in nodes
    ]
    shards = [(at, _rows(node, num_devices)) for at, node in enumerate(nodes) if is_shards(node)]
    longest = {at: max(1, int(np.diff(of.cuts).max())) for at, of in shards}
    orders = {at: np.zeros((num_devices, len(of.rows), longest[at]), np.int32) for at, of in shards}
    examples = []
    for device in range(num_devices):
        parts = [
            (at, run, rows[slice(*of.cuts[run, device : device + 2])])
            for at, of in shards
            for run, rows in enumerate(of.rows)
        ]
        is_local = np.zeros(num_examples, bool)
        for _, _, rows in parts:
            is_local[rows] = True
        local_index = np.cumsum(is_local) - 1
        for at, run, rows in parts:
            orders[at][device, run, : len(rows)] = local_index[rows]
        examples.append(np.flatnonzero(is_local))
    for at, of in shards:
        size = np.asarray(nodes[at].size)
        # Within the rows of the device that owns the shard.
        device_of = owner(np.arange(size.shape[1]), size.shape[1], num_devices)
        start = np.cumsum(size, axis=1) - size - of.cuts[:, device_of]
        nodes[at] = type(nodes[at])(orders[at], start.astype(np.int32), size)
    most = max(1, *map(len, examples))
    rows = np.stack([np.pad(each, (0, most - len(each))) for each in examples])
    return rows, jax.tree.unflatten(structure, nodes)


def _rows(shards: Tree, num_devices: int) -> _Rows:
    order, start, size = map(np.asarray, shards)
    first = np.cumsum(size, axis=1) - size
    total = size.sum(1)
    rows = [
        of_run[np.repeat(begin - before, count) + np.arange(count.sum())]
        for of_run, begin, before, count in zip(order, start, first, size, strict=True)
    ]
    num_shards = size.shape[1]
    at = first_client(np.arange(num_devices), num_shards, num_devices)
    within = np.minimum(at, num_shards - 1)
    begins = np.where(at < num_shards, first[:, within], total[:, None])
    return _Rows(rows, np.concatenate([begins, total[:, None]], axis=1))


def _cut(shared: SharedExamples, num_devices: int) -> SharedExamples:
    """Cut each of the N shards into a part for each device; the parts of a device are adjacent."""
    start, size = np.asarray(shared.start), np.asarray(shared.size)
    cuts = size[:, None] * np.arange(num_devices + 1)[:, None] // num_devices  # [R, k + 1, N]
    starts = (start[:, None] + cuts[:, :-1]).reshape(len(size), -1)
    parts: Any = (starts, np.diff(cuts, axis=1).reshape(len(size), -1))
    return SharedExamples(shared.order, *parts)
