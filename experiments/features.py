"""Features of images by a frozen published network, computed once and stored as a data set.

fedjax-inv features --dataset=PACS --model=clip_b16 --weights=clip.safetensors --out=features.npz

Images are resized to squares and normalised as the network's were in its training; flags change
that. The data set has x, y, domain, test, valid, client, group and path, as far as the data have
them, and a record: digests of weights and images, preprocessing, layer. The same command goes on
after Ctrl-C.
"""

from absl import app, flags

from . import command_line, sheet, start
from .config import Data

flags.DEFINE(
    flags.EnumParser(["nearest", "bilinear", "bicubic", "lanczos"]),
    "interpolation",
    None,
    "How images are resized; default: the network's own.",
)
flags.DEFINE_bool("crop", False, "Whether their middle square is taken, in place of all, squeezed.")
_NUMBER = flags.FloatParser()
sheet.define_list(
    "mean", [], "Of each channel of images in [0, 1]; default: the network's.", _NUMBER
)
sheet.define_list("deviation", [], "The same of standard deviations.", _NUMBER)
flags.DEFINE_bool("unit_length", False, "Whether features are divided by their lengths.")
flags.DEFINE_integer("images_at_once", 64, "Images of a batch.", lower_bound=1)
# Of train: the data, the network and the devices.
_OF_DATA = {*sheet.names(Data)} - {"held_out", "validate", "test_fraction", "stride"}
for _name in (*sorted(_OF_DATA), "model", "widths", "weights", "precision", "devices", "out"):
    flags.declare_key_flag(_name)


@start.binary
def main(argv: list[str]) -> str:
    """Writes the features, and returns where they are."""
    del argv
    from . import extraction
    from .assembly import machine

    chosen = command_line.chosen()
    given = flags.FLAGS
    machine.prepare(chosen.machine)
    return extraction.run(
        chosen,
        extraction.FeatureOptions(
            out=given.out,
            interpolation=given.interpolation or "",
            crop=given.crop,
            mean=tuple(given.mean),
            deviation=tuple(given.deviation),
            unit_length=given.unit_length,
            images_at_once=given.images_at_once,
        ),
    )


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
