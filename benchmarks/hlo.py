"""Launches, loops, memory traffic and collectives of a compiled program, read from its text.

The text is `compiled.as_text()`, the program after all of XLA's passes. Nothing is run.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

# Instructions that name or regroup buffers, and launch nothing.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "async-update"),
    *("while", "conditional", "call"),  # their computations are counted
}
_COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"),
)
_HOST = ("infeed", "outfeed", "send", "recv")
_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_LINE = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^(\(.*?\)|[\w\[\],{}:()*]+) ([\w\-]+)\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_PLACED = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    opcode: str
    shape: str  # of the result, as in the text
    text: str  # the line from the operands on

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        names = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.text)
        for several in re.findall(r"branch_computations=\{([^}]*)\}", self.text):
            names += [name.strip().lstrip("%") for name in several.split(",")]
        return names + re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.text)

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        names = re.sub(r"/\*.*?\*/", "", self.text.partition(")")[0])
        return [name.strip().lstrip("%") for name in names.split(",")]

    @property
    def scope(self) -> str:
        """The named scopes of the program around it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found.group(1) if found else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return num_bytes(self.shape)


class Loop(NamedTuple):
    """A while loop of a program."""

    body: str
    turns: int | None  # None: known only at run time
    scope: str


def num_bytes(shape: str) -> int:
    """Bytes of a shape, or of all shapes in a tuple."""
    total = 0
    for kind, sizes in _SHAPE.findall(shape):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * _BYTES.get(kind, 0)
    return total


def _in_memory(shape: str) -> list[int]:
    """Bytes of each array of a shape; 0 for arrays outside of a TPU's main memory."""
    return [0 if "S(" in array else num_bytes(array) for array in _PLACED.findall(shape)]


class Program:
    """The computations of a compiled program, by name.

    expected: scope -> turns of its loops of unknown length; by default one turn is counted.
    """

    def __init__(self, text: str, expected: Mapping[str, float] | None = None) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self._expected = expected or {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head.group(2), [])
                if head.group(1):
                    self.entry = head.group(2)
            elif (parts := _LINE.match(line)) and (result := _OPCODE.match(parts.group(2))):
                shape, opcode = result.groups()
                rest = parts.group(2)[result.end() :]
                current.append(Instruction(parts.group(1), opcode, shape, rest))

    def loops(self, within: str = "") -> list[Loop]:
        """The loops of a computation, by default of the program, each before its inner loops."""
        found = []
        for one in self.computations[within or self.entry]:
            if one.opcode == "while":
                (body,) = re.findall(r"body=%?([\w.\-]+)", one.text)
                found.append(Loop(body, self.turns(one), one.scope))
                found += self.loops(body)
            elif one.opcode in ("call", "conditional"):
                for name in one.called:
                    found += self.loops(name)
        return found

    def turns(self, loop: Instruction) -> int | None:
        """The number of turns of a while loop, None if unknown: a GPU's compiler writes it down, a
        TPU's leaves a condition that compares the turn, from 0 on, with a constant."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known.group(1))
        (name,) = re.findall(r"condition=%?([\w.\-]+)", loop.text)
        condition = self.computations[name]
        constants = {
            one.name: int(value)
            for one in condition
            if one.opcode == "constant" and (value := one.text.partition(")")[0]).isdecimal()
        }
        last = condition[-1]
        if last.opcode == "compare" and "direction=LT" in last.text:
            return constants.get(last.operands[-1])
        return None

    def expected(self, loop: Instruction) -> float:
        """The number of turns of a while loop, if unknown the expected one."""
        if (turns := self.turns(loop)) is not None:
            return turns
        last = loop.scope.removesuffix("/while").rpartition("/")[2]
        return next((turns for scope, turns in self._expected.items() if scope in last), 1)

    def launches(self, computation: str) -> list[Instruction]:
        """The kernels, library calls and copies of a computation: one for each instruction that is
        not free, with one turn of each loop in it."""
        result = []
        for one in self.computations[computation]:
            if one.opcode in ("while", "call", "conditional"):
                for name in one.called:
                    result += self.launches(name)
            elif not _is_free(one):
                result.append(one)
        return result

    def everything(self, computation: str = "") -> Iterator[Instruction]:
        """All instructions that a computation runs, also inside of fusions."""
        for one in self.computations[computation or self.entry]:
            yield one
            for name in one.called:
                if name in self.computations:
                    yield from self.everything(name)

    def named(self, scope: str) -> Loop | None:
        """The outermost loop of a scope, None without one."""
        return next((loop for loop in self.loops() if scope in loop.scope), None)

    def of(self, computation: str, *opcodes: str) -> list[Instruction]:
        """The instructions of some kinds, also inside of fusions and loops."""
        return [one for one in self.everything(computation) if one.opcode in opcodes]


def collectives(program: Program, computation: str = "") -> list[Instruction]:
    """The collectives of a computation, by default of the whole program."""
    kinds = {f"{name}{ending}" for name in _COLLECTIVES for ending in ("", "-start")}
    return program.of(computation, *kinds)


def host_transfers(program: Program) -> list[Instruction]:
    """Transfers between the device and the host."""
    return program.of("", *_HOST)


def cycles(one: Instruction) -> int:
    """The cycles that a TPU's compiler estimates for a launch; 0 where it says nothing."""
    found = re.search(r'"estimated_cycles":"(\d+)"', one.text)
    return int(found.group(1)) if found else 0


def grouped_convolutions(program: Program) -> list[Instruction]:
    """Convolutions in groups of features or of examples."""
    pattern = re.compile(r"(?:feature|batch)_group_count=(?!1\b)\d+")
    return [one for one in program.everything() if pattern.search(one.text)]


def flops(program: Program, computation: str = "", scope: str = "") -> float:
    """Operations of all products and convolutions of a computation, or of a scope within it.

    The program must be one before XLA's passes, in which a product is one on every platform.
    """
    return _total(program, computation or program.entry, scope, _flops)


def bytes_moved(program: Program, computation: str = "", scope: str = "") -> float:
    """Bytes that all launches of a computation, or of a scope within it, read and write."""

    def of(one: Instruction, shapes: dict[str, str]) -> float:
        if _is_free(one):
            return 0.0
        return _bytes_written(program, one, shapes) + _bytes_read(program, one, shapes)

    return _total(program, computation or program.entry, scope, of)


def _total(
    program: Program,
    computation: str,
    scope: str,
    of: Callable[[Instruction, dict[str, str]], float],
) -> float:
    """The sum of of(instruction, shapes of its computation) over a computation's launches."""
    instructions = program.computations[computation]
    shapes = {one.name: one.shape for one in instructions}
    total = 0.0
    for one in instructions:
        is_inside = scope in one.scope
        if one.opcode in ("while", "call", "conditional"):
            turns = program.expected(one) if one.opcode == "while" else 1
            rest = "" if is_inside else scope
            total += turns * sum(_total(program, name, rest, of) for name in one.called)
        elif is_inside:
            total += of(one, shapes)
    return total


# Opcodes that take rows of their first operand; that write rows into it -> the rows' operand.
_TAKES = ("gather", "dynamic-slice")
_PUTS = {"dynamic-update-slice": 1, "scatter": 2}


_COPIES = ("copy-start", "slice-start")  # (to, from) or (from, to), and a token


def _bytes_written(program: Program, one: Instruction, shapes: dict[str, str]) -> int:
    """Bytes that a launch writes: its result, or the rows that it changes in place."""
    written = sum(_in_memory(one.shape))
    if one.opcode in _PUTS:
        rows = num_bytes(shapes.get(one.operands[_PUTS[one.opcode]], ""))
        return min(written, rows)
    if one.opcode in _COPIES:
        ends = _in_memory(one.shape)[:2]
        size = min(map(num_bytes, _PLACED.findall(one.shape)[:2]))
        return sum(size for end in ends if end)
    if one.opcode != "fusion":
        return written
    inside = {each.name: each for each in program.computations[one.called[0]]}
    root = list(inside.values())[-1]
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    of_inside = {each.name: each.shape for each in inside.values()}
    return min(written, sum(_bytes_written(program, result, of_inside) for result in results))


def _bytes_read(program: Program, one: Instruction, shapes: dict[str, str]) -> int:
    """Bytes that a launch reads: its operands, of some only rows, and nothing of an operand that it
    changes in place."""
    if one.opcode in _COPIES:
        return 0  # counted as written
    read = [sum(_in_memory(shapes.get(name, ""))) for name in one.operands]
    if one.opcode in _TAKES:
        return min(read[0], one.num_bytes) + sum(read[1:])
    if one.opcode in _PUTS:
        return sum(read[1:])
    inside = program.computations.get(one.called[0], []) if one.opcode == "fusion" else []
    for parameter in (i for i in inside if i.opcode == "parameter"):
        index, users = int(parameter.text.partition(")")[0]), _users(parameter, inside)
        rows = [i.num_bytes if i.opcode in _TAKES else 0 for i in users]
        if users and index < len(read):
            read[index] = min(read[index], sum(rows))
    return sum(read)


def _users(parameter: Instruction, inside: list[Instruction]) -> list[Instruction]:
    """Instructions that take or change rows of a parameter; [] if it is also used otherwise."""
    users = [i for i in inside if parameter.name in i.operands]
    partly = [
        i for i in users if i.opcode in (*_TAKES, *_PUTS) and i.operands.index(parameter.name) == 0
    ]
    return partly if len(partly) == len(users) else []


def _flops(one: Instruction, shapes: dict[str, str]) -> float:
    """Operations of a product or convolution: two for each term of each sum."""
    if one.opcode not in ("dot", "convolution"):
        return 0.0
    result = _sizes(one.shape)
    sizes = [_sizes(shapes.get(name, "")) for name in one.operands[:2]]
    if one.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        axes = [int(axis) for axis in found.group(1).split(",") if axis] if found else []
        return 2.0 * math.prod(result) * math.prod(sizes[0][axis] for axis in axes)
    labels = re.search(r"dim_labels=\w+_(\w+)->", one.text)
    if not labels or len(sizes) < 2 or not sizes[1]:
        return 0.0
    kernel = zip(labels.group(1), sizes[1], strict=True)
    return 2.0 * math.prod(result) * math.prod(size for label, size in kernel if label != "o")


def _sizes(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(size) for size in found.group(2).split(",") if size] if found else []


def _is_free(one: Instruction) -> bool:
    """Whether an instruction launches nothing. Single numbers are free: a TPU has a core of its own
    for them, and a GPU's compiler fuses everything but their copies."""
    if one.opcode == "fusion":
        return not one.num_bytes
    is_end = one.opcode.endswith("-done")
    return (
        is_end
        or one.opcode in _FREE
        or (bool(re.match(r"\w+\[\]", one.shape)) and one.opcode != "copy")
    )
