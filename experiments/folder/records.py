"""The types of the json files in a run folder, and the function that reads them.

A field that has its default is absent from the file.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias, TypeVar

import msgspec

from fedjax_inv.checks import UsageError
from fedjax_inv.data.uses import Uses

from ..assembly import grid
from ..assembly.metrics import ACCURACY, Measure

T = TypeVar("T")
Flag = str | bool | int | float | list[str | int | float]
SettingValue = str | bool | int | float | None


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of all records."""

    # Rules of selection and columns of papers read fields like the entries of a dict.

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self.__struct_fields__ and getattr(self, name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """A field by its name; `default` if it is absent."""
        return getattr(self, name) if name in self else default

    def __or__(self, changes: dict[str, Any]) -> Self:
        return msgspec.structs.replace(self, **changes)


class Domain(Record, frozen=True):
    """The scores of the predictions for the examples of a domain."""

    score: float
    loss: float | None  # mean loss; None if it is not finite
    examples: int
    split: str  # validation, test, or one of `data.federation.UNSEEN`


class Line(Record, frozen=True, kw_only=True):
    """A line of metrics.jsonl: an evaluation of a run. Round 0 is before any training."""

    round: int
    run: int  # its number in the cell
    seed: int
    hyper: dict[str, float]
    left_out: str = ""  # the domain that the run trains without and is tested by
    # Of a run with all domains: the mean test score of the runs without one of them.
    left_out_score: float | None = None
    train_loss: float | None  # None in round 0, and if it is not finite
    train_metrics: dict[str, float | None] | None = None
    test_by_round: list[float] | None = None  # this and the next field: with --watch_examples
    train_by_round: list[float] | None = None
    domains: dict[str, Domain]
    validation_score: float
    test_score: float
    worst_domain: str
    worst_score: float
    balanced_score: float | None = None  # this and the next three: with --watch_classes
    score_by_class: list[float | None] | None = None  # None: a class without test examples
    client_score: float | None = None
    score_by_client: list[float | None] | None = None
    diverged: bool  # in this round or before
    ended: int | None = None  # with --after_stop=end: the round of the end, in this one or before
    dropped: int | None = None  # the rounds so far in which a client was dropped
    seconds: float  # since the run began
    bytes: int  # downloads and uploads of all clients so far

    @property
    def played(self) -> int:
        """The number of rounds that the run has played; none follow its end."""
        return self.round if self.ended is None else self.ended


class StopRecord(Record, frozen=True):
    """The evaluation at a stop. Without a stop all fields but the threshold are absent."""

    threshold: float
    round: int | None
    train_score: float | None = None
    domains: dict[str, Domain] | None = None
    validation_score: float | None = None
    test_score: float | None = None
    worst_domain: str | None = None
    worst_score: float | None = None


class RunRecord(Record, frozen=True):
    """A run of a cell."""

    seed: int
    hyper: dict[str, float]
    left_out: str = ""


class CellRecord(Record, frozen=True):
    """A cell of the grid (`grid.Cell`)."""

    algorithm: str
    settings: dict[str, SettingValue]
    held_out: str | None
    runs: Annotated[list[RunRecord], msgspec.Meta(min_length=1)]
    validate: str | None = None  # the domain of --validate

    @classmethod
    def of(cls, cell: grid.Cell) -> Self:
        """The record of a cell."""
        return msgspec.convert(cell.record(), cls)

    def restored(self) -> grid.Cell:
        """The cell of the record."""
        return grid.of_record(msgspec.to_builtins(self))


class Provenance(Record, frozen=True):
    """The provenance of a run: of its start, or merged of several starts."""

    date: str
    commit: str | None
    versions: dict[str, str]
    processor: str | None
    data: str  # the digest of the data set as it was read
    code: dict[str, str] = {}  # of the modules of one's own, by their names
    weights: str = ""  # of the files of --weights and --head_from
    networks: str = ""  # of the initial networks of --init_from
    library: str | None = None  # of this library's own sources
    folder: str = ""  # the working directory, to which paths of flags are relative


class Origin(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record beside a study's table: how it came about.

    `commit`, `data`, `processor` and `versions` say "several" for what differed between runs.
    """

    command: str
    seeds: list[int]
    date: str | None = None  # of the last start
    commit: str | None = None
    data: str | None = None  # the SHA-256 of the data as they were read
    versions: dict[str, str]
    processor: str | None = None
    seconds: float | None = None  # of training, the cells one after the other
    sha256: str | None = None  # of the table or picture, if it is published
    note: str | None = None  # what else is known about a table whose runs left no record


class RowRecord(Record, frozen=True):
    """row.json: a row that has run in a folder."""

    label: str
    number: int  # in the order in which rows first ran there


class UsesRecord(Record, frozen=True):
    """What the examples of the first seed are used for (`data.uses.Uses`), without domains."""

    counts: dict[str, int]  # of each use that examples have
    repeated: int | None  # test examples with the inputs of training examples; None: not counted
    new_classes: dict[str, int]  # of the test alone, with their numbers of examples

    @classmethod
    def of(cls, found: Uses) -> Self:
        """The record of the uses."""
        counts = {use: number for use in found.counts if (number := found.total(use))}
        return cls(counts, found.repeated, found.new_classes)


class FolderRecord(Record, frozen=True):
    """config.json: the flags and the cell of a folder, its provenance and its examples."""

    flags: dict[str, Flag]
    cell: CellRecord
    start: Provenance
    uses: UsesRecord | None = None
    weighting: str = ""  # of clients of different sizes: size, uniform or own; "" if they are alike
    served: str | None = None  # `Assembly.served`


class RunResult(Record, frozen=True):
    """The result of a run."""

    seed: int
    hyper: dict[str, float]
    diverged: bool
    by_rule: dict[str, Line | None]  # by each rule of `selection`
    last: Line
    stops: list[StopRecord] | None = None  # by threshold
    # Reports fill it with what --select picks.
    selected: Line | None = None

    @property
    def choice(self) -> Line:
        """The selected evaluation, in a report."""
        assert self.selected is not None
        return self.selected

    @property
    def stop(self) -> StopRecord | None:
        """The evaluation at the stop by the first threshold; None if there is none."""
        return self.stops[0] if self.stops and self.stops[0].round else None


# Held-out domain -> seed -> (the test accuracy of always answering the most frequent class of the
# training, and that of always answering each class); empty without classes
Constants: TypeAlias = dict[str, dict[str, tuple[float, list[float]]]]


class Result(Record, frozen=True):
    """result.json of a cell."""

    cell: CellRecord
    runs: list[RunResult]  # of the cell's, those that leave no domain out, which come first
    score: Measure = ACCURACY
    constants: Constants = {}  # where the cell is all of a run folder; as in `Sweep`


class Sweep(Record, frozen=True):
    """result.json of a sweep."""

    title: str
    cells: list[Result]
    constants: Constants = {}


def decoded(text: bytes, kind: type[T]) -> T | None:
    """The record in a json text; None if the text is not such a record.

    Scores of a run that diverged may be NaN, which Python writes and strict JSON does not have.
    """
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError):
        return None


def read(path: Path, kind: type[T], remedy: str = "") -> T:
    """The record in a json file.

    remedy: a text that says what to do about a damaged file.

    Raises UsageError if the file is damaged, and OSError if it cannot be read.
    """
    record = decoded(path.read_bytes(), kind)
    if record is None:
        text = remedy or f"delete {path.parent} to begin anew"
        raise UsageError(str(path), ..., f"is damaged, or of another version; {text}")
    return record
