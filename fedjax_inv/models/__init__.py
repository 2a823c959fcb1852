"""Networks in two halves, body and head, with a cut that can move.

Those of this package have logits of `num_classes` classes, K, and convolutions of the kind `conv`,
one of LOWERINGS.
"""

from typing import TYPE_CHECKING, Any

from fedjax_inv.models import saved as saved
from fedjax_inv.models import weights as weights
from fedjax_inv.models.alexnet import alexnet as alexnet
from fedjax_inv.models.blocks import apply as apply
from fedjax_inv.models.blocks import from_blocks as from_blocks
from fedjax_inv.models.blocks import from_flax as from_flax
from fedjax_inv.models.blocks import from_function as from_function
from fedjax_inv.models.blocks import predict as predict
from fedjax_inv.models.bodies import BODIES as BODIES
from fedjax_inv.models.bodies import Body as Body
from fedjax_inv.models.bodies import encoder as encoder
from fedjax_inv.models.bodies import without_body as without_body
from fedjax_inv.models.cnn import cnn as cnn
from fedjax_inv.models.cnn import leaf_cnn as leaf_cnn
from fedjax_inv.models.efficientnet import efficientnet_lite0 as efficientnet_lite0
from fedjax_inv.models.heads import adapter as adapter
from fedjax_inv.models.heads import cosine as cosine
from fedjax_inv.models.heads import from_vectors as from_vectors
from fedjax_inv.models.heads import linear as linear
from fedjax_inv.models.lenet import lenet as lenet
from fedjax_inv.models.lowerings import LOWERINGS as LOWERINGS
from fedjax_inv.models.lowerings import lowering as lowering
from fedjax_inv.models.lstm import lstm as lstm
from fedjax_inv.models.lstm import word_weights as word_weights
from fedjax_inv.models.mlp import mlp as mlp
from fedjax_inv.models.mlp import widths_for as widths_for
from fedjax_inv.models.norms import BatchNorm as BatchNorm
from fedjax_inv.models.norms import FrozenBatchNorm as FrozenBatchNorm
from fedjax_inv.models.norms import GroupNorm as GroupNorm
from fedjax_inv.models.resnet import resnet18 as resnet18
from fedjax_inv.models.resnet import resnet50 as resnet50
from fedjax_inv.models.scaling import InUnits as InUnits
from fedjax_inv.models.scaling import Scaled as Scaled
from fedjax_inv.models.scaling import Scaling as Scaling
from fedjax_inv.models.scaling import in_units as in_units
from fedjax_inv.models.scaling import on_standard as on_standard
from fedjax_inv.models.scaling import scaled as scaled
from fedjax_inv.models.scaling import with_scaling as with_scaling
from fedjax_inv.models.scaling import with_targets as with_targets
from fedjax_inv.models.vit import vit as vit
from fedjax_inv.models.wrappers import augmented as augmented
from fedjax_inv.models.wrappers import computed_in as computed_in
from fedjax_inv.models.wrappers import normalised as normalised
from fedjax_inv.models.wrappers import painted as painted
from fedjax_inv.models.wrappers import rendered as rendered
from fedjax_inv.models.wrappers import unit_range as unit_range

if TYPE_CHECKING:
    from fedjax_inv.models.nnx_modules import from_nnx as from_nnx


def __getattr__(name: str) -> Any:
    """Import `from_nnx` when it is used, as flax.nnx takes a sixth of the time of all imports."""
    if name != "from_nnx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedjax_inv.models.nnx_modules import from_nnx

    return from_nnx
