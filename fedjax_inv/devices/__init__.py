"""The placement of work, data and clients' states in time, in memory and on devices.

An `Axis` lays the slots of a cohort over time and memory (`vmapped`, `chunked`) and over devices
(`sharded`, `owned`). A `Layout` places the arrays of a program on k devices, in one of two ways. A
shard is the list of the rows of one client, or of one set of test examples. Each device holds

| arrays                 | with own=False | with own=True                           |
|------------------------|----------------|-----------------------------------------|
| examples               | all            | the rows of its own shards              |
| shards of clients      | all            | those of the clients that it owns       |
| states of clients      | all            | those of the clients that it owns       |
| shared (test) shards   | all            | a k-th of each                          |
| server, and all others | all            | all                                     |

`owner` says which device owns a client. With own=False (`sharded`) a device computes a k-th of the
slots and every k-th batch of an evaluation. With own=True (`owned`) it computes the slots of its
own clients and evaluates the examples of its own shards. On the host and in checkpoints, arrays are
the same for either layout and for any number of devices.
"""

from fedjax_inv.devices.axis import Add as Add
from fedjax_inv.devices.axis import Assignment as Assignment
from fedjax_inv.devices.axis import Axis as Axis
from fedjax_inv.devices.axis import Fn as Fn
from fedjax_inv.devices.axis import chunked as chunked
from fedjax_inv.devices.axis import over as over
from fedjax_inv.devices.axis import owned as owned
from fedjax_inv.devices.axis import sharded as sharded
from fedjax_inv.devices.axis import vmapped as vmapped
from fedjax_inv.devices.ownership import clients_per_device as clients_per_device
from fedjax_inv.devices.ownership import first_client as first_client
from fedjax_inv.devices.ownership import owner as owner
from fedjax_inv.devices.placement import ClientShards as ClientShards
from fedjax_inv.devices.placement import Layout as Layout
from fedjax_inv.devices.placement import SharedExamples as SharedExamples
from fedjax_inv.devices.placement import is_shards as is_shards
from fedjax_inv.devices.placement import local_view as local_view
