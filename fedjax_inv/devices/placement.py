"""Placement on several devices: runs and clients, with all data on each device or only its own.

Axis letters: R runs, k_r x k_c devices that share runs x clients, N shards, l rows of one device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Device
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_inv import checks
from fedjax_inv.devices import axis as axes
from fedjax_inv.devices.ownership import clients_per_device, first_client, owner
from fedjax_inv.types import Array, Examples, Tree

T = TypeVar("T")

_WAITING = 1.5  # the price of a round in which devices wait for each other, by measurement
RUNS, CLIENTS = "runs", "clients"  # the axes of a mesh
_PARTS = 16  # parts of a shared shard, where their number does not depend on the devices
_STEPS = 64  # the numbers of rows of devices are rounded up to a multiple of 1/64 of all
_WHOLE = PartitionSpec()


class ClientShards(NamedTuple):
    """The shards of the clients of each run: a `Federation` without its examples.

    All runs share the examples.
    """

    order: Array  # [R, L]; placed by owner: [k_c, R, l]
    start: Array  # [R, C]
    size: Array  # [R, C]


class SharedExamples(NamedTuple):
    """Shards that no training client owns, such as the test's; each device evaluates parts.

    Placed by owner, they are cut into P parts, and lie in the order of parts.
    """

    order: Array  # [R, L]; placed by owner: [k_c, R, l]
    start: Array  # [R, N]; placed by owner: [R, P N]
    size: Array  # [R, N]; placed by owner: [R, P N]


def is_shards(node: Tree) -> bool:
    """Return whether a node of a tree of inputs is one of these records of shards."""
    return isinstance(node, ClientShards | SharedExamples)


def shape_of_mesh(
    num_runs: int,
    num_slots: int,
    num_devices: int,
    *,
    most: int = 0,
    multiple: int = 1,
) -> tuple[int, int]:
    """Return (k_r, k_c): how many devices share the runs, and how many the clients of a run.

    The busiest device trains ceil(R / k_r) ceil(S / k_c) clients in a round. With k_c above 1 they
    count half as much again, because the devices wait for each other in each round. Of all pairs
    whose product is at most k, this is the smallest; among equals the one with the most devices for
    runs, and then with the fewest devices.

    Args:
      num_runs: R.
      num_slots: S, the clients of a round.
      num_devices: k.
      most: the largest k_c; 0: no limit.
      multiple: a number that divides k_r k_c, such as that of the processes; it divides k.

    Raises:
      UsageError: if a number is too small, or if `multiple` does not divide k.
    """
    for name, number in (
        *(("num_runs", num_runs), ("num_slots", num_slots), ("num_devices", num_devices)),
        ("multiple", multiple),
    ):
        checks.integer(name, number)
    checks.integer("most", most, 0)
    if num_devices % multiple:
        raise checks.UsageError(
            "multiple", multiple, "must divide {devices}", devices=("num_devices", num_devices)
        )

    def cost(pair: tuple[int, int]) -> tuple[float, int, int]:
        of_runs, of_clients = pair
        busiest = -(-num_runs // of_runs) * -(-num_slots // of_clients)
        return (
            busiest * (_WAITING if of_clients > 1 else 1),
            -min(of_runs, num_runs),
            of_runs * of_clients,
        )

    pairs = [
        (of_runs, of_clients)
        for of_runs in range(1, num_devices + 1)
        for of_clients in range(1, num_devices // of_runs + 1)
        if of_runs * of_clients % multiple == 0
    ]
    # More devices than runs or clients are of use only to processes, which must all take part.
    few = [
        pair
        for pair in pairs
        if pair[0] <= num_runs and pair[1] <= min(num_slots, most or math.inf)
    ]
    return min(few or pairs, key=cost)


def mesh(shape: tuple[int, int], devices: Sequence[Device]) -> Mesh | None:
    """Return the mesh of the first devices, with the axes `RUNS` and `CLIENTS`.

    Args:
      shape: (k_r, k_c), as `shape_of_mesh` returns it.
      devices: k_r k_c of them or more.

    Returns:
      The mesh; None for a single device.
    """
    if math.prod(shape) == 1:
        return None
    kinds, used = (AxisType.Auto,) * 2, devices[: math.prod(shape)]
    return jax.make_mesh(shape, (RUNS, CLIENTS), kinds, devices=used)


class Layout(NamedTuple):
    """The devices that share runs and clients, and what lies on each of them."""

    mesh: Mesh | None = None  # of the axes "runs" and "clients", or of "clients"; None: one device
    own: bool = False  # whether only the data and states of its own clients lie on a device
    lanes: int = 0  # L, as in `devices.chunked`
    num_runs: int = 1  # R, which matters if several devices share the runs

    def _size(self, name: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape.get(name, 1)

    @property
    def run_devices(self) -> int:
        """k_r, how many devices share the runs."""
        return self._size(RUNS)

    @property
    def client_devices(self) -> int:
        """k_c, how many devices share the clients of a run."""
        return self._size(CLIENTS)

    @property
    def everywhere(self) -> NamedSharding:
        """The placement of arrays that are whole on every device, of several."""
        return self._sharding(_WHOLE)

    @property
    def num_parts(self) -> int:
        """P, into how many parts shards of `SharedExamples` are cut."""
        return _PARTS if self.lanes else self.client_devices

    def axis(self, inner: axes.Axis) -> axes.Axis:
        """Return the axis that assigns slots to the devices; each folds its own by `inner`."""
        name = CLIENTS if self.client_devices > 1 else None
        return inner._replace(name=name, lanes=self.lanes, replicated=not self.own)

    def clients_per_device(self, num_clients: int) -> int:
        """Return how many clients' states of a run lie on a device."""
        if not self.own:
            return num_clients
        return clients_per_device(num_clients, self.client_devices, self.lanes)

    def runs_per_device(self, num_runs: int) -> int:
        """Return how many of R runs a device trains."""
        return -(-num_runs // self.run_devices)

    @property
    def run_spec(self) -> PartitionSpec:
        """The placement of arrays [R, ...]."""
        return PartitionSpec(RUNS) if self.run_devices > 1 else _WHOLE

    @property
    def client_spec(self) -> PartitionSpec:
        """The placement of clients' states [R, C, ...]."""
        return PartitionSpec(RUNS if self.run_devices > 1 else None, self._client_name)

    @property
    def _client_name(self) -> str | None:
        return CLIENTS if self.own and self.client_devices > 1 else None

    @property
    def by_device(self) -> PartitionSpec:
        """The placement of arrays [k_c, R, ...] that differ from device to device."""
        name = CLIENTS if self.own and self.client_devices > 1 else None
        return PartitionSpec(name, RUNS if self.run_devices > 1 else None)

    @property
    def _data_spec(self) -> PartitionSpec:
        """The placement of examples [k_r k_c, m, ...] that differ from device to device."""
        assert self.mesh is not None
        return PartitionSpec(self.mesh.axis_names)

    def over(
        self, fn: Callable[..., Tree], others: tuple[Tree, ...], results: Tree
    ) -> Callable[..., Tree]:
        """Return fn(data, inputs, *others) run on every device, with data and inputs as placed.

        Args:
          fn: a function of the arrays on one device.
          others: where the other arguments lie, a tree of `PartitionSpec` for each.
          results: where the results lie, a tree of `PartitionSpec`.
        """
        mesh = self.mesh
        if mesh is None:
            return fn

        def on_device(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            return fn(*(local_view(data, inputs) if self.own else (data, inputs)), *rest)

        def run(data: Examples, inputs: Tree, *rest: Tree) -> Tree:
            of_data = self._data_spec if self.own else _WHOLE
            in_specs = (of_data, self._specs(inputs), *others)
            return axes.over(mesh, on_device, in_specs, results)(data, inputs, *rest)

        return run

    def _specs(self, inputs: Tree) -> Tree:
        def of(node: Tree) -> Tree:
            if self.own and is_shards(node):
                others = jax.tree.map(lambda _: self.run_spec, node[1:])
                return type(node)(self.by_device, *others)
            return self.run_spec

        return jax.tree.map(of, inputs, is_leaf=is_shards)

    def my_runs(self, tree: T, num_local: int) -> T:
        """Return the runs of this device, of leaves [R, ...] that are whole on it.

        Args:
          tree: the leaves.
          num_local: how many runs the device has. The last run stands for runs beyond R.
        """
        if self.run_devices == 1:
            return tree
        first = jax.lax.axis_index(RUNS) * num_local
        wanted = first + jax.numpy.arange(num_local)
        return jax.tree.map(lambda leaf: leaf[jax.numpy.minimum(wanted, leaf.shape[0] - 1)], tree)

    def place(
        self,
        data: Examples,
        inputs: T,
        put: Callable[[Tree, NamedSharding], Tree] | None = None,
    ) -> tuple[Examples, T]:
        """Place data and inputs on the devices, as the program expects them.

        The last run is repeated until the devices share the runs evenly.

        Args:
          data: M examples, whole and equal on each process.
          inputs: a tree of leaves [R, ...] with `ClientShards` and `SharedExamples` in it, equal on
            each process.
          put: how to place a tree under a sharding; by default `jax.device_put`.

        Returns:
          (data, inputs), their leaves placed. With `own`, data are [k_r k_c, m, ...]: for each
          device the examples that its shards name, padded to the largest number on a device.
        """
        if self.mesh is None:
            return data, inputs
        put = put or _put
        whole, by_run = self.everywhere, self._sharding(self.run_spec)
        inputs = jax.tree.map(self._padded, inputs)
        if not self.own:
            return put(data, whole), put(inputs, by_run)
        rows, inputs = self._split(len(jax.tree.leaves(data)[0]), inputs)

        def placed(node: Tree) -> Tree:
            if not is_shards(node):
                return put(node, by_run)
            order = put(node.order, self._sharding(self.by_device))
            return type(node)(order, *put((node.start, node.size), by_run))

        local = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)
        placed_data = put(local, self._sharding(self._data_spec))
        return placed_data, jax.tree.map(placed, inputs, is_leaf=is_shards)

    def _put(self, tree: T, spec: PartitionSpec) -> T:
        """Place a tree of arrays, equal on each process."""
        return _put(tree, self._sharding(spec))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def _padded(self, leaf: Array) -> Array:
        """Repeat the last of the runs [R, ...] until the devices share them evenly."""
        more = -leaf.shape[0] % self.run_devices
        return leaf if more == 0 else _concatenated([leaf, *[leaf[-1:]] * more])

    def _split(self, num_examples: int, inputs: T) -> tuple[np.ndarray, T]:
        """Return (rows of the examples on each device, inputs with their shards by device)."""
        by_block = []
        for block in range(self.run_devices):

            def runs(leaf: Array, block: int = block) -> Array:
                share = len(leaf) // self.run_devices
                return leaf[block * share : (block + 1) * share]

            by_block.append(_split(num_examples, jax.tree.map(runs, inputs), self))
        rows = _stretched([rows for rows, _ in by_block], num_examples)

        def joined(*nodes: Tree) -> Tree:
            if not is_shards(nodes[0]):
                return _concatenated(nodes)
            orders, starts, sizes = zip(*nodes, strict=True)
            order = np.concatenate(_stretched(orders, num_examples), axis=1)
            return type(nodes[0])(order, np.concatenate(starts), np.concatenate(sizes))

        trees = (tree for _, tree in by_block)
        return np.concatenate(rows), jax.tree.map(joined, *trees, is_leaf=is_shards)

    def place_runs(self, tree: T) -> T:
        """Place a tree of arrays [R, ...], equal on each process, as the program expects them."""
        if self.mesh is None:
            return tree
        return self._put(jax.tree.map(self._padded, tree), self.run_spec)

    def place_clients(self, states: Tree) -> Tree:
        """Place clients' states [R, C, ...], equal on each process, as the program expects them."""

        def padded(leaf: Array) -> Any:
            num_clients, leaf = leaf.shape[1], self._padded(leaf)
            share = self.clients_per_device(num_clients)
            more = share * (self.client_devices if self.own else 1) - num_clients
            if not more:
                return leaf
            return np.pad(np.asarray(leaf), [(0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 2))

        states = jax.tree.map(padded, states)
        if self.mesh is None:
            return jax.device_put(states)
        return self._put(states, self.client_spec)

    def gather_clients(self, states: Tree, num_clients: int) -> Tree:
        """Return clients' states [R, C, ...], the same for every layout and number of devices.

        Args:
          states: the states that the program returned, or their shapes.
          num_clients: C.

        Returns:
          The states, on the host if they differ between devices; shapes if `states` are shapes.
        """

        def leaf(array: Array) -> Tree:
            if isinstance(array, jax.ShapeDtypeStruct):
                shape = array.shape[0], num_clients, *array.shape[2:]
                return jax.ShapeDtypeStruct(shape, array.dtype)
            return (on_host(array) if self.mesh else array)[:, :num_clients]

        states = self.gather_runs(states)
        return jax.tree.map(leaf, states) if self.own else states

    def gather_runs(self, tree: Tree) -> Tree:
        """Return arrays [R, ...] of all runs, the same for every layout and number of devices.

        Args:
          tree: arrays that the program returned, or their shapes.

        Returns:
          The arrays, on the host if they differ between devices; shapes if `tree` has shapes.
        """
        if self.run_devices == 1:
            return tree

        def leaf(array: Array) -> Tree:
            if isinstance(array, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((self.num_runs, *array.shape[1:]), array.dtype)
            if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
                keys = jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
                # Keys have no form on the host, and orbax saves no array of one process alone.
                return _put(keys, self.everywhere)
            return on_host(array)[: self.num_runs]

        return jax.tree.map(leaf, tree)


def on_host(array: Array) -> np.ndarray:
    """Return an array on the host, whichever devices of whichever processes it lies on."""
    is_here = not isinstance(array, jax.Array) or array.is_fully_addressable
    if not (is_here or array.is_fully_replicated):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _put(tree: T, where: NamedSharding) -> T:
    """Place a tree of arrays, equal on each process, under a sharding."""

    def leaf(array: Array) -> Array:
        if isinstance(array, jax.Array) and array.sharding == where:
            return array
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
        return jax.device_put(np.asarray(array), where)

    return jax.tree.map(leaf, tree)


def _concatenated(arrays: Sequence[Array]) -> Any:
    if jax.numpy.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _concatenated([jax.random.key_data(array) for array in arrays])
        )
    return np.concatenate([np.asarray(array) for array in arrays])


def local_view(data: Examples, inputs: T) -> tuple[Examples, T]:
    """Return the part of one device of data and inputs, as placed with `own`.

    Args:
      data: examples that `Layout.place` has placed with `own`, [1, m, ...] inside `over`. Outside
        they are [k, m, ...], and the first device's are taken.
      inputs: a tree whose shards have an order [1, R, l] or [k_c, R, l].

    Returns:
      (data [m, ...], inputs whose shards have an order [R, l]).
    """

    def local(node: Tree) -> Tree:
        return node._replace(order=node.order[0]) if is_shards(node) else node

    mine = jax.tree.map(lambda leaf: leaf[0], data)
    return mine, jax.tree.map(local, inputs, is_leaf=is_shards)


def cut(shared: SharedExamples, num_parts: int) -> SharedExamples:
    """Cut each shard into parts, and return all first parts, then all second parts, and so on.

    Args:
      shared: N shards, of one run or of R.
      num_parts: P.

    Returns:
      P N shards of the same rows.
    """
    part = np.arange(num_parts + 1)[:, None]
    size, start = shared.size[..., None, :], shared.start[..., None, :]
    # Not size * part // num_parts, which may exceed int32.
    cuts = size // num_parts * part + size % num_parts * part // num_parts  # [..., P + 1, N]
    starts, sizes = start + cuts[..., :-1, :], cuts[..., 1:, :] - cuts[..., :-1, :]
    shape = (*shared.size.shape[:-1], -1)
    return SharedExamples(shared.order, starts.reshape(shape), sizes.reshape(shape))


class _Rows(NamedTuple):
    """The rows of each run's shards, one shard after the other, cut between devices."""

    rows: list[np.ndarray]  # R times [size.sum()]
    cuts: np.ndarray  # [R, k_c + 1], where the rows of each device begin, and the end


def _split(num_examples: int, inputs: T, layout: Layout) -> tuple[np.ndarray, T]:
    """Return (rows of the examples on each device [k_c, m], inputs with their shards by device)."""
    nodes, structure = jax.tree.flatten(inputs, is_leaf=is_shards)
    nodes = [type(node)(*map(np.asarray, node)) if is_shards(node) else node for node in nodes]
    nodes = [
        cut(node, layout.num_parts) if isinstance(node, SharedExamples) else node for node in nodes
    ]
    num_devices = layout.client_devices
    shards = [(at, _rows(node, layout)) for at, node in enumerate(nodes) if is_shards(node)]
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
        size = nodes[at].size
        number = size.shape[1]
        # Within the rows of the device that owns the shard.
        device_of = owner(np.arange(number), number, num_devices, layout.lanes)
        start = np.cumsum(size, axis=1) - size - of.cuts[:, device_of]
        nodes[at] = type(nodes[at])(orders[at], start.astype(np.int32), size)
    return np.stack(_stretched(examples, num_examples)), jax.tree.unflatten(structure, nodes)


def _stretched(arrays: Sequence[np.ndarray], num_examples: int) -> list[np.ndarray]:
    """Append zeros in the last axis to the largest length, rounded up.

    So that held-out domains of almost equal sizes share a program.
    """
    step = -(-num_examples // _STEPS)
    most = max(1, *(array.shape[-1] for array in arrays))
    length = -(-most // step) * step
    return [
        np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, length - array.shape[-1])])
        for array in arrays
    ]


def _rows(shards: Tree, layout: Layout) -> _Rows:
    order, start, size = shards
    first = np.cumsum(size, axis=1) - size
    total = size.sum(1)
    rows = [
        of_run[np.repeat(begin - before, count) + np.arange(count.sum())]
        for of_run, begin, before, count in zip(order, start, first, size, strict=True)
    ]
    num_shards, num_devices = size.shape[1], layout.client_devices
    at = first_client(np.arange(num_devices), num_shards, num_devices, layout.lanes)
    within = np.minimum(at, num_shards - 1)
    begins = np.where(at < num_shards, first[:, within], total[:, None])
    return _Rows(rows, np.concatenate([begins, total[:, None]], axis=1))
