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
"""

from fedjax_inv.devices.axis import Axis as Axis
from fedjax_inv.devices.axis import chunked as chunked
from fedjax_inv.devices.axis import over as over
from fedjax_inv.devices.axis import owned as owned
from fedjax_inv.devices.axis import sharded as sharded
from fedjax_inv.devices.axis import vmapped as vmapped
from fedjax_inv.devices.ownership import clients_per_device as clients_per_device
from fedjax_inv.devices.ownership import owner as owner
from fedjax_inv.devices.placement import CLIENTS as CLIENTS
from fedjax_inv.devices.placement import RUNS as RUNS
from fedjax_inv.devices.placement import ClientShards as ClientShards
from fedjax_inv.devices.placement import Devices as Devices
from fedjax_inv.devices.placement import Layout as Layout
from fedjax_inv.devices.placement import SharedExamples as SharedExamples
from fedjax_inv.devices.placement import is_shards as is_shards
from fedjax_inv.devices.placement import local_view as local_view
from fedjax_inv.devices.placement import memory as memory
from fedjax_inv.devices.placement import mesh as mesh
from fedjax_inv.devices.placement import on_host as on_host
from fedjax_inv.devices.placement import part as part
from fedjax_inv.devices.placement import shape_of_mesh as shape_of_mesh
from fedjax_inv.devices.placement import too_large as too_large
