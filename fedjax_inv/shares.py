"""What several devices hold: all examples and clients' states each, or those of their own clients.

Of k devices and C clients, device d owns the ceil(C / k) clients from d ceil(C / k) on, as
`clients.owned` deals them; axis letter R: runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_inv import clients
from fedjax_inv.types import Array, Examples, Tree

T = TypeVar("T")

_WHOLE = PartitionSpec()


class Holdings(NamedTuple):
    """A federation of each run without its examples, which all runs share."""

    order: Array  # [R, L]; [k, R, L] where each device holds what its own clients need
    start: Array  # [R, C]
    size: Array  # [R, C]


class Common(NamedTuple):
    """Holdings of no training client, such as the test's, of which each device may own a part."""

    order: Array  # [R, L]; [k, R, L]
    start: Array  # [R, N]; [R, k N], device after device
    size: Array  # [R, N]; [R, k N]


class Layout(NamedTuple):
    """The devices that share the clients, and what each of them holds."""

    mesh: Mesh  # of one axis
    own: bool  # whether a device holds the examples and states of its own clients alone

    @property
    def num_parts(self) -> int:
        """In how many parts `Common` holdings are."""
        return self.mesh.size if self.own else 1

    def axis(self, inner: clients.Axis) -> clients.Axis:
        """How slots are dealt to the devices, each of which folds its own by `inner`."""
        return (clients.owned if self.own else clients.sharded)(self.mesh.axis_names[0], inner)

    @property
    def of_clients(self) -> PartitionSpec:
        """Where arrays [R, C, ...] lie."""
        return PartitionSpec(None, self.mesh.axis_names[0]) if self.own else _WHOLE

    @property
    def _of_devices(self) -> PartitionSpec:
        """Where arrays lie that differ from device to device."""
        return PartitionSpec(self.mesh.axis_names[0])

    def over(
        self, fn: Callable[..., Tree], others: tuple[Tree, ...], results: Tree
    ) -> Callable[..., Tree]:
        """fn(data, inputs, *others) run on every device. others, results: where those lie."""
        if not self.own:
            return clients.over(self.mesh, fn)

        def on_device(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            return fn(*of_device(data, inputs), *rest)

        def run(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            held = self._specs(inputs)
            return clients.over(self.mesh, on_device, (self._of_devices, held, *others), results)(
                data, inputs, *rest
            )

        return run

    def _specs(self, inputs: Tree) -> Tree:
        def of(leaf: Tree) -> Tree:
            return type(leaf)(self._of_devices, _WHOLE, _WHOLE) if is_held(leaf) else _WHOLE

        return jax.tree.map(of, inputs, is_leaf=is_held)

    def dealt(
        self,
        data: Examples,
        inputs: T,
        place: Callable[[Tree, NamedSharding], Tree] | None = None,
    ) -> tuple[Examples, T]:
        """Data and inputs, whole and equal on each process, where the program wants them.

        place: what is made of a tree of arrays that are to lie somewhere; by default they do.
        """
        place = place or put
        whole = NamedSharding(self.mesh, _WHOLE)
        if not self.own:
            return place((data, inputs), whole)
        rows, inputs = _dealt(len(data.y), inputs, self.mesh.size)
        by_device = NamedSharding(self.mesh, self._of_devices)

        def held(leaf: Tree) -> Tree:
            if not is_held(leaf):
                return place(leaf, whole)
            return type(leaf)(place(leaf.order, by_device), *place((leaf.start, leaf.size), whole))

        mine = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)
        return place(mine, by_device), jax.tree.map(held, inputs, is_leaf=is_held)

    def whole(self, tree: T) -> T:
        """A tree of equal arrays on each process, whole on every device."""
        return put(tree, NamedSharding(self.mesh, _WHOLE))

    def of_stored(self, states: Tree) -> Tree:
        """Clients' states [R, C, ...], equal on each process, where the program wants them."""

        def padded(leaf: Array) -> np.ndarray:
            more = -leaf.shape[1] % self.num_parts
            return np.pad(np.asarray(leaf), [(0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 2))

        return put(jax.tree.map(padded, states), NamedSharding(self.mesh, self.of_clients))

    def to_store(self, states: Tree, num_clients: int) -> Tree:
        """Clients' states [R, C, ...] as they are on any number of devices, whole on the host where
        devices have their own; of shapes, shapes."""
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


def put(tree: T, where: NamedSharding) -> T:
    """A tree of equal arrays on each process, as arrays that lie as `where` says."""

    def leaf(array: Array) -> Array:
        if isinstance(array, jax.Array) and array.sharding == where:
            return array
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
        return jax.device_put(np.asarray(array), where)

    return jax.tree.map(leaf, tree)


def of_device(data: Examples, inputs: T) -> tuple[Examples, T]:
    """What a device sees of data and inputs of which it holds its own."""

    def held(leaf: Tree) -> Tree:
        return leaf._replace(order=leaf.order[0]) if is_held(leaf) else leaf

    mine = jax.tree.map(lambda leaf: leaf[0], data)
    return mine, jax.tree.map(held, inputs, is_leaf=is_held)


def is_held(leaf: Tree) -> bool:
    """Whether a part of inputs is holdings."""
    return isinstance(leaf, (Holdings, Common))


class _Rows(NamedTuple):
    """The rows of each run's clients, one client after the other, cut between devices."""

    rows: list[np.ndarray]  # R times [size.sum()]
    cuts: np.ndarray  # [R, k + 1], between the rows of one device and those of the next


def _dealt(num_examples: int, inputs: T, num_devices: int) -> tuple[np.ndarray, T]:
    """(rows of the examples that each device holds [k, m], inputs with their holdings dealt)."""
    leaves, structure = jax.tree.flatten(inputs, is_leaf=is_held)
    leaves = [_cut(leaf, num_devices) if isinstance(leaf, Common) else leaf for leaf in leaves]
    held = [(at, _rows(leaf, num_devices)) for at, leaf in enumerate(leaves) if is_held(leaf)]
    longest = {at: max(1, int(np.diff(of.cuts).max())) for at, of in held}
    orders = {at: np.zeros((num_devices, len(of.rows), longest[at]), np.int32) for at, of in held}
    mine = []
    for device in range(num_devices):
        parts = [
            (at, run, rows[slice(*of.cuts[run, device : device + 2])])
            for at, of in held
            for run, rows in enumerate(of.rows)
        ]
        are_mine = np.zeros(num_examples, bool)
        for _, _, rows in parts:
            are_mine[rows] = True
        lies_at = np.cumsum(are_mine) - 1
        for at, run, rows in parts:
            orders[at][device, run, : len(rows)] = lies_at[rows]
        mine.append(np.flatnonzero(are_mine))
    for at, of in held:
        size = np.asarray(leaves[at].size)
        # Within the rows of the device that holds the client.
        owner = np.arange(size.shape[1]) // -(-size.shape[1] // num_devices)
        start = np.cumsum(size, axis=1) - size - of.cuts[:, owner]
        leaves[at] = type(leaves[at])(orders[at], start.astype(np.int32), size)
    most = max(1, *map(len, mine))
    rows = np.stack([np.pad(each, (0, most - len(each))) for each in mine])
    return rows, jax.tree.unflatten(structure, leaves)


def _rows(held: Tree, num_devices: int) -> _Rows:
    order, start, size = map(np.asarray, held)
    first = np.cumsum(size, axis=1) - size
    total = size.sum(1)
    rows = [
        of_run[np.repeat(begin - before, count) + np.arange(count.sum())]
        for of_run, begin, before, count in zip(order, start, first, size, strict=True)
    ]
    share = -(-size.shape[1] // num_devices)
    at = np.arange(num_devices) * share
    within = np.minimum(at, size.shape[1] - 1)
    begins = np.where(at < size.shape[1], first[:, within], total[:, None])
    return _Rows(rows, np.concatenate([begins, total[:, None]], axis=1))


def _cut(held: Common, num_devices: int) -> Common:
    """Each of the N holdings in a part for each device, the first device's parts first."""
    start, size = np.asarray(held.start), np.asarray(held.size)
    cuts = size[:, None] * np.arange(num_devices + 1)[:, None] // num_devices  # [R, k + 1, N]
    starts = (start[:, None] + cuts[:, :-1]).reshape(len(size), -1)
    cut: Any = (starts, np.diff(cuts, axis=1).reshape(len(size), -1))
    return Common(held.order, *cut)
