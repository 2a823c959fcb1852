"""The placement of work, data and clients' states in time, in memory and on devices.

An `Axis` lays the slots of a cohort over time and memory (`vmapped`, `chunked`) and over devices
(`sharded`, `owned`). A `Layout` places the arrays of a program on a mesh of k_r x k_c devices: k_r
of them share the runs, and for each run k_c share the clients. A shard is the list of the rows of
one client, or of one set of test examples. Each device holds

| arrays                 | with own=False   | with own=True                        |
|------------------------|------------------|--------------------------------------|
| examples               | all              | the rows of its own shards           |
| shards of clients      | all of its runs' | those of the clients that it owns    |
| states of clients      | all of its runs' | those of the clients that it owns    |
| shared (test) shards   | all of its runs' | a part of each                       |
| server, and all others | all of its runs' | all of its runs'                     |

`owner` says which device owns a client. With own=False (`sharded`) a device computes consecutive
slots. With own=True (`owned`) it computes the slots of its own clients. Devices that share runs
send each other nothing. On the host and in checkpoints, arrays are the same for any layout and any
number of devices; on several devices sums have another order, and so round in another way.

Axis letters: R runs, k_r x k_c devices that share runs x clients, N shards, l rows and m examples
of one device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Device
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_inv import axis as axes
from fedjax_inv import checks, platforms, types
from fedjax_inv.axis import Axis as Axis
from fedjax_inv.axis import chunked as chunked
from fedjax_inv.axis import clients_per_device as clients_per_device
from fedjax_inv.axis import over as over
from fedjax_inv.axis import owned as owned
from fedjax_inv.axis import owner as owner
from fedjax_inv.axis import sharded as sharded
from fedjax_inv.axis import vmapped as vmapped
from fedjax_inv.data.federation import rows_of
from fedjax_inv.types import Array, Tree

T = TypeVar("T")

_MORE = 1.25  # places for each run, up to which shared batches make up for repeated runs
_WAITING = 1.5  # the price of a round in which devices wait for each other, by measurement
RUNS, CLIENTS = "runs", "clients"  # the axes of a mesh
_STEPS = 64  # the numbers of rows of devices are rounded up to a multiple of 1/64 of all
_WHOLE = PartitionSpec()


class ClientShards(NamedTuple):
    """The shards of the clients of each run: a `Federation` without its examples.

    All runs share the examples. A client's rows are on the device that owns it.
    """

    order: Array  # [R, L]; placed by owner: [k_c, R, l]
    start: Array  # [R, C]; placed by owner: [k_c, R, C]
    size: Array  # [R, C]


class SharedExamples(NamedTuple):
    """Shards that no training client owns, such as the test's. Each device has a part of each."""

    order: Array  # [R, L]; placed by owner: [k_c, R, l]
    start: Array  # [R, N]; placed by owner: [k_c, R, N], where the device's part begins
    size: Array  # [R, N], of the whole shard


def is_shards(node: Tree) -> bool:
    """Return whether a node of a tree of inputs is one of these records of shards."""
    return isinstance(node, ClientShards | SharedExamples)


def part(size: Any, device: Any, num_devices: int) -> tuple[Any, Any]:
    """Return the part of shared shards of whole sizes [..., N] that a device of k has.

    It is (where the part begins in the shard, its size), each [..., N].
    """
    # Not size * device // k, which may exceed int32.
    begin, end = (
        size // num_devices * at + size % num_devices * at // num_devices
        for at in (device, device + 1)
    )
    return begin, end - begin


def shape_of_mesh(
    num_runs: int, num_slots: int, num_devices: int, *, multiple: int = 1
) -> tuple[int, int]:
    """Return (k_r, k_c): how many devices share the R runs, and how many the S clients of a run.

    The busiest device trains ceil(R / k_r) ceil(S / k_c) clients in a round. With k_c above 1 they
    count half as much again, because the devices wait for each other in each round. Of all pairs
    whose product is at most k and a multiple of `multiple`, such as the number of processes, this
    is the smallest; among equals the one with the most devices for runs, and then with the fewest
    devices.
    """

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
    few = [pair for pair in pairs if pair[0] <= num_runs and pair[1] <= num_slots]
    return min(few or pairs, key=cost)


def mesh(shape: tuple[int, int], devices: Sequence[Device]) -> Mesh | None:
    """Return the mesh of the first k_r k_c devices, with the axes `RUNS` and `CLIENTS`.

    `shape` is (k_r, k_c), as `shape_of_mesh` returns it. For a single device there is None.
    """
    if math.prod(shape) == 1:
        return None
    kinds = (AxisType.Auto,) * 2
    used = devices[: math.prod(shape)]
    return jax.make_mesh(shape, (RUNS, CLIENTS), kinds, devices=used)


class Layout(NamedTuple):
    """The devices that share runs and clients, and what lies on each of them."""

    mesh: Mesh | None = None  # of the axes "runs" and "clients", or of "clients"; None: one device
    own: bool = False  # whether only the data and states of its own clients lie on a device
    num_runs: int = 1  # R, which matters if several devices share the runs
    # The runs in the order in which they lie, device by device; (): as they are, and the last one
    # is repeated until the devices share them evenly.
    order: tuple[int, ...] = ()
    settings: int = 1  # runs that lie beside each other and share all but their settings

    @classmethod
    def of(
        cls,
        devices: Sequence[Device],
        num_runs: int,
        num_slots: int,
        num_clients: int,
        own: bool | None = None,
    ) -> "Layout":
        """Return the layout of runs and clients on some or all of k devices.

        Of R runs and C clients S attend a round. Of several processes it takes equally many devices
        of each. `own` is whether a device holds only its own clients; None: where all attend. Where
        few do, one device may own more of them than another, which then waits.
        """
        by_process: dict[int, list[Device]] = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        number = len(by_process)
        shape = shape_of_mesh(num_runs, num_slots, len(devices), multiple=number)
        share = math.prod(shape) // number
        used = [device for each in by_process.values() for device in each[:share]]
        if own is None:
            own = num_slots == num_clients > 1 and shape[1] > 1
        return cls(mesh(shape, used), own, num_runs)

    def sharing(self, runs: np.ndarray) -> "Layout":
        """Return the layout in which a row's runs lie together, of a table of runs [S, G].

        The runs of a row share all but their settings. Devices share the rows, or the columns if
        fewer runs are then repeated; if too many would be, the layout stays as it is.
        """
        number = self.run_devices
        rows = runs[_evenly(len(runs), number)]
        columns = runs[:, _evenly(runs.shape[1], number)]
        order, settings = rows.ravel(), runs.shape[1]
        if columns.size < rows.size:
            parts = np.split(columns, number, axis=1)
            order = np.concatenate([part.ravel() for part in parts])
            settings = parts[0].shape[1]
        if settings == 1 or len(order) > _MORE * len(_evenly(runs.size, number)):
            return self
        is_moved = not np.array_equal(order, np.arange(runs.size))
        return self._replace(order=tuple(order.tolist()) if is_moved else (), settings=settings)

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

    def axis(self, inner: Axis) -> Axis:
        """Return the axis that assigns slots to the devices; each folds its own by `inner`."""
        name = CLIENTS if self.client_devices > 1 else None
        return inner._replace(name=name, replicated=not self.own)

    @property
    def run_spec(self) -> PartitionSpec:
        """The placement of arrays [R, ...]."""
        return _WHOLE if self._run_name is None else PartitionSpec(self._run_name)

    @property
    def client_spec(self) -> PartitionSpec:
        """The placement of clients' states [R, C, ...]."""
        return PartitionSpec(self._run_name, self._client_name)

    @property
    def _by_device(self) -> PartitionSpec:
        """The placement of arrays [k_c, R, ...] that differ from device to device."""
        return PartitionSpec(self._client_name, self._run_name)

    @property
    def _run_name(self) -> str | None:
        return RUNS if self.run_devices > 1 else None

    @property
    def _client_name(self) -> str | None:
        return CLIENTS if self.own and self.client_devices > 1 else None

    @property
    def _data_spec(self) -> PartitionSpec:
        """The placement of examples; with `own` they are [k_r k_c, m, ...]."""
        assert self.mesh is not None
        return PartitionSpec(self.mesh.axis_names) if self.own else _WHOLE

    def over(
        self, fn: Callable[..., Tree], others: tuple[Tree, ...], results: Tree
    ) -> Callable[..., Tree]:
        """Return fn(data, inputs, *others) run on every device, with data and inputs as placed.

        The function is of the arrays on one device. Trees of `PartitionSpec` say where each of the
        other arguments and the results lie.
        """
        mesh = self.mesh
        if mesh is None:
            return fn

        def on_device(data: types.Examples, inputs: Tree, *rest: Tree) -> Tree:
            return fn(*(local_view(data, inputs) if self.own else (data, inputs)), *rest)

        @functools.wraps(fn)  # whose name a profile shows
        def run(data: types.Examples, inputs: Tree, *rest: Tree) -> Tree:
            in_specs = (self._data_spec, self._specs(inputs), *others)
            return axes.over(mesh, on_device, in_specs, results)(data, inputs, *rest)

        return run

    def _specs(self, inputs: Tree) -> Tree:
        """Return where each leaf of inputs lies; shards that differ have the axis k_c."""

        def of(node: Tree) -> Tree:
            if self.own and is_shards(node):
                return type(node)(self._by_device, self._by_device, self.run_spec)
            return jax.tree.map(lambda _: self.run_spec, node)

        return jax.tree.map(of, inputs, is_leaf=is_shards)

    def my_runs(self, tree: T, num_local: int) -> T:
        """Return this device's num_local runs of leaves [R, ...] that are whole on it.

        The last run stands for runs beyond R.
        """
        if self.run_devices == 1 and not self.order:
            return tree
        first = jax.lax.axis_index(RUNS) * num_local if self.run_devices > 1 else 0
        wanted = first + jax.numpy.arange(num_local)
        if self.order:
            wanted = jax.numpy.asarray(self.order)[wanted]
        return jax.tree.map(lambda leaf: leaf[jax.numpy.minimum(wanted, leaf.shape[0] - 1)], tree)

    def place(
        self,
        data: types.Examples,
        inputs: T,
        put: Callable[[Tree, NamedSharding], Tree] | None = None,
    ) -> tuple[types.Examples, T]:
        """Place data and inputs, equal on each process, on the devices as the program expects them.

        The last run is repeated until the devices share the runs evenly. With `own`, data become
        [k_r k_c, m, ...]: for each device the examples that its shards name, padded to the largest
        number on a device.

        Args:
          data: M examples.
          inputs: a tree of leaves [R, ...] with `ClientShards` and `SharedExamples` in it.
          put: places a tree under a sharding, for devices that are not there.
        """
        put = put or _put
        inputs = jax.tree.map(self._in_places, inputs)
        if self.mesh is None:
            return data, inputs
        if self.own:
            rows, inputs = _by_owner(len(jax.tree.leaves(data)[0]), inputs, self)
            data = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)
        inputs = jax.tree.map(
            lambda leaf, spec: put(leaf, self._sharding(spec)), inputs, self._specs(inputs)
        )
        return put(data, self._sharding(self._data_spec)), inputs

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def _in_places(self, leaf: Array) -> Array:
        """Return the runs [R, ...] in their order, some repeated so that devices share evenly."""
        places = np.array(self.order) if self.order else _evenly(leaf.shape[0], self.run_devices)
        return _at(leaf, 0, places)

    def place_runs(self, tree: T) -> T:
        """Place a tree of arrays [R, ...], equal on each process, as the program expects them."""
        tree = jax.tree.map(self._in_places, tree)
        return tree if self.mesh is None else _put(tree, self._sharding(self.run_spec))

    def place_clients(self, states: Tree) -> Tree:
        """Place clients' states [R, C, ...], equal on each process, as the program expects them."""

        states = jax.tree.map(self._in_places, states)
        if self.mesh is None:
            return jax.device_put(states)
        if self._client_name is not None:
            states = jax.tree.map(
                lambda leaf: _at(leaf, 1, _evenly(leaf.shape[1], self.client_devices)), states
            )
        return _put(states, self._sharding(self.client_spec))

    def gather_clients(self, states: Tree, num_clients: int) -> Tree:
        """Return clients' states [R, C, ...] of the program, the same for every layout.

        They are on the host if they differ between devices.
        """
        states = self.gather_runs(states)
        if self._client_name is None:
            return states
        return jax.tree.map(lambda array: on_host(array)[:, :num_clients], states)

    def gather_runs(self, tree: Tree) -> Tree:
        """Return arrays [R, ...] of the program for all runs, the same for every layout.

        They are on the host if they differ between devices.
        """
        if self.run_devices == 1 and not self.order:
            return tree
        places = np.arange(self.num_runs)
        if self.order:
            places = np.array([self.order.index(run) for run in range(max(self.order) + 1)])

        def leaf(array: Array) -> Tree:
            if _is_key(array):
                keys = jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
                # Keys have no form on the host, and orbax saves no array of one process alone.
                return keys if self.mesh is None else _put(keys, self._sharding(_WHOLE))
            return on_host(array)[places]

        return jax.tree.map(leaf, tree)


ONE_DEVICE = Layout()
_PART_FOR_DATA = 0.5  # of a CPU's memory, for the examples of all its devices
_PART_FOR_STREAM = 0.7  # of the memory; examples that need more stay on the host


class Devices(NamedTuple):
    """The devices that runs may use, and what each of them holds and trains at once."""

    # How many of JAX's devices; None: all that help and fit into memory.
    number: int | None = None
    # Whether a device holds only the examples and states of its own clients; None: where several
    # devices share the clients of a run and all of these attend.
    own: bool | None = None
    # Whether the examples stay on the host, but for those of the next rounds; None: if they do not
    # fit into memory and there is one process.
    stream: bool | None = None
    client_chunk: int | None = None  # clients trained at once, 0 for all; None: 1 on CPUs, else all
    run_chunk: int | None = None  # the same for runs; fewer need less memory
    precision: str | None = None  # of products, of `platforms.PRECISIONS`; None: the algorithm's
    quick_to_compile: bool = False  # in less time, to code for CPUs that runs longer

    def check(self) -> None:
        """Raise UsageError for a field that is out of range."""
        for name, least in (("number", 1), ("client_chunk", 0), ("run_chunk", 0)):
            if getattr(self, name) is not None:
                checks.integer(f"devices.{name}", getattr(self, name), least)
        for name in ("own", "stream", "quick_to_compile"):
            if getattr(self, name) is not None:
                checks.truth(f"devices.{name}", getattr(self, name))
        if self.precision is not None:
            checks.one_of("devices.precision", self.precision, platforms.PRECISIONS)

    def streams(self, num_clients: int, num_bytes: int) -> bool:
        """Return whether examples of so many bytes stay on the host.

        A single client, which may hold the pooled examples of all, needs them all at once.
        """
        if self.stream is not None or num_clients == 1 or jax.process_count() > 1:
            return bool(self.stream)
        return too_large(num_bytes)

    def layout(self, num_runs: int, num_slots: int, num_clients: int, num_bytes: int) -> Layout:
        """Return the layout of R runs, S slots and C clients with examples of so many bytes.

        Raises UsageError if there are too few devices.
        """
        used = platforms.devices(self.number)
        own = self.own
        copied = num_bytes
        if self.streams(num_clients, num_bytes):
            own, copied = False, 0
        while True:
            found = Layout.of(used, num_runs, num_slots, num_clients, own)
            copies = found.run_devices * (1 if found.own else found.client_devices)
            # The devices of a CPU have one memory: by default it takes fewer.
            is_fixed = self.number is not None or jax.process_count() > 1 or len(used) == 1
            if is_fixed or not platforms.on_cpu() or copies * copied <= _PART_FOR_DATA * memory():
                return found
            used = used[:-1]


def too_large(num_bytes: int) -> bool:
    """Return whether so many bytes do not fit into memory beside what computes on them."""
    return num_bytes > _PART_FOR_STREAM * memory()


def memory() -> int:
    """Return the memory in bytes of this process's first device, or of the machine."""
    stats = jax.local_devices()[0].memory_stats()
    return (stats or {}).get("bytes_limit", 0) or platforms.machine_bytes()


def _evenly(number: int, num_devices: int) -> np.ndarray:
    """Return 0..number - 1, and the last again until the devices share them evenly."""
    count = clients_per_device(number, num_devices) * num_devices
    return np.minimum(np.arange(count), number - 1)


def _at(array: Array, axis: int, index: np.ndarray) -> Array:
    """Return entries of an axis, taken on the host, where nothing is compiled for each shape."""
    if np.array_equal(index, np.arange(array.shape[axis])):
        return array
    if _is_key(array):
        return jax.random.wrap_key_data(_at(jax.random.key_data(array), axis, index))
    return np.take(on_host(array), index, axis)  # type: ignore[return-value]


def on_host(array: Array) -> np.ndarray:
    """Return an array on the host, whichever devices of whichever processes it lies on."""
    is_here = not isinstance(array, jax.Array) or array.is_fully_addressable
    if not (is_here or array.is_fully_replicated):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _is_key(array: Array) -> bool:
    return jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


def _put(tree: T, where: NamedSharding) -> T:
    """Place a tree of arrays, equal on each process, under a sharding."""

    def leaf(array: Array) -> Array:
        if isinstance(array, jax.Array) and array.sharding == where:
            return array
        if _is_key(array):
            return jax.random.wrap_key_data(leaf(jax.random.key_data(array)))
        return jax.device_put(np.asarray(array), where)

    return jax.tree.map(leaf, tree)


def local_view(data: types.Examples, inputs: T) -> tuple[types.Examples, T]:
    """Return the part of one device, data [m, ...] and shards with an order [R, l].

    Data and inputs are as `Layout.place` has placed them with `own`. Inside `over` they are [1, m,
    ...] and [1, R, l]; outside [k, m, ...] and [k_c, R, l], and the first device's are taken.
    """

    def local(node: Tree) -> Tree:
        return type(node)(node.order[0], node.start[0], node.size) if is_shards(node) else node

    mine = jax.tree.map(lambda leaf: leaf[0], data)
    return mine, jax.tree.map(local, inputs, is_leaf=is_shards)


def _by_owner(num_examples: int, inputs: T, layout: Layout) -> tuple[np.ndarray, T]:
    """Return (rows of the examples on each device [k_r k_c, m], inputs with shards by device)."""
    nodes, structure = jax.tree.flatten(inputs, is_leaf=is_shards)
    places = [at for at, node in enumerate(nodes) if is_shards(node)]
    shards = [type(nodes[at])(*map(np.asarray, nodes[at])) for at in places]
    k_r = layout.run_devices
    k_c = layout.client_devices
    runs = np.array_split(np.arange(len(shards[0].size)), k_r)
    held: list[np.ndarray] = []  # for each device its examples
    orders: Any = [[[np.zeros(0)] * sum(map(len, runs)) for _ in range(k_c)] for _ in shards]
    starts = [np.zeros((k_c, *each.size.shape), np.int32) for each in shards]
    for number in range(k_r * k_c):
        mine, device = runs[number // k_c], number % k_c
        rows = {}
        for at, each in enumerate(shards):
            start, size = _on_device(each, device, k_c)
            starts[at][device] = np.cumsum(size, axis=1) - size
            for run in mine:
                rows[at, run] = rows_of(each.order[run], start[run], size[run])
        is_here = np.zeros(num_examples, bool)
        for of_shards in rows.values():
            is_here[of_shards] = True
        local_index = np.cumsum(is_here) - 1
        for (at, run), of_shards in rows.items():
            orders[at][device][run] = local_index[of_shards]
        held.append(np.flatnonzero(is_here))
    for at, each, order, start in zip(places, shards, orders, starts, strict=True):
        rows_by_device = _stretched([row for of_device in order for row in of_device], num_examples)
        together = rows_by_device.reshape(k_c, len(each.size), -1).astype(np.int32)
        nodes[at] = type(each)(together, start, each.size)
    return _stretched(held, num_examples), jax.tree.unflatten(structure, nodes)


def _on_device(shards: Tree, device: int, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, size), each [R, N], of what a device has of each shard."""
    if isinstance(shards, SharedExamples):
        begin, size = part(shards.size, device, num_devices)
        return shards.start + begin, size
    number = shards.size.shape[1]
    is_mine = owner(np.arange(number), number, num_devices) == device
    return shards.start, np.where(is_mine, shards.size, 0)


def _stretched(arrays: Sequence[np.ndarray], num_examples: int) -> np.ndarray:
    """Stack arrays with zeros appended, to the largest length rounded up.

    So that held-out domains of almost equal sizes share a program.
    """
    step = -(-num_examples // _STEPS)
    length = -(-max(1, *(len(array) for array in arrays)) // step) * step
    return np.stack([np.pad(array, (0, length - len(array))) for array in arrays])
