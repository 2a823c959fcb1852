"""Launches, loops, bytes and collectives of a compiled program, read from its text.

The text is `compiled.as_text()`, the program after all of XLA's passes. Nothing is run.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Instructions that name or regroup buffers, and launch nothing.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "async-update"),
}
_NESTED = ("while", "conditional", "call")  # their computations are counted
_COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"),
    *("all-reduce-start", "all-gather-start", "collective-permute-start"),
)
# Opcodes that take rows of their first operand; that put rows into it -> the operand of the rows.
_TAKES = ("gather", "dynamic-slice")
_PUTS = {"dynamic-update-slice": 1, "scatter": 2}
HOST = ("infeed", "outfeed", "send", "recv")
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
        """The names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.text.partition(")")[0])

    @property
    def scope(self) -> str:
        """The named scopes of the program around it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found.group(1) if found else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, or of all results in a tuple."""
        return sum(
            math.prod(int(size) for size in sizes.split(",") if size) * _BYTES.get(kind, 0)
            for kind, sizes in _SHAPE.findall(self.shape)
        )

    @property
    def is_free(self) -> bool:
        """Whether it launches nothing. Single numbers are free: a TPU has a core of its own for
        them, and a GPU's compiler fuses everything but their copies."""
        if self.opcode == "fusion":
            return not self.num_bytes
        is_number = bool(re.match(r"\w+\[\]", self.shape)) and self.opcode != "copy"
        return is_number or self.opcode.endswith("-done") or self.opcode in _FREE

    @property
    def is_grouped(self) -> bool:
        """Whether it is a convolution in groups of features or of examples."""
        return bool(re.search(r"(?:feature|batch)_group_count=(?!1\b)\d+", self.text))


class Loop(NamedTuple):
    """A while loop of a program."""

    body: str
    turns: int | None  # None: known only at run time
    scope: str


class Program:
    """The computations of a compiled program, by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
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
                found.append(Loop(body, self._turns(one), one.scope))
            for name in one.called if one.opcode in _NESTED else ():
                found += self.loops(name)
        return found

    def _turns(self, loop: Instruction) -> int | None:
        """The number of turns of a while loop, None if unknown: a GPU's compiler writes it down, a
        TPU's leaves a condition that compares the turn, from 0 on, with a constant."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known.group(1))
        (name,) = re.findall(r"condition=%?([\w.\-]+)", loop.text)
        constants = {
            one.name: int(value)
            for one in self.computations[name]
            if one.opcode == "constant" and (value := one.text.partition(")")[0]).isdecimal()
        }
        last = self.computations[name][-1]
        if last.opcode == "compare" and "direction=LT" in last.text:
            return constants.get(last.text.partition(")")[0].split(",")[-1].strip().lstrip("%"))
        return None

    def launches(self, computation: str) -> list[Instruction]:
        """The kernels, library calls and copies of a computation: one for each instruction that is
        not free, with one turn of each loop in it."""
        result = []
        for one in self.computations[computation]:
            if one.opcode in _NESTED:
                result += [each for name in one.called for each in self.launches(name)]
            elif not one.is_free:
                result.append(one)
        return result

    def everything(self, computation: str = "") -> Iterator[Instruction]:
        """All instructions that a computation runs, also inside of fusions."""
        for one in self.computations[computation or self.entry]:
            yield one
            for name in one.called:
                if name in self.computations:
                    yield from self.everything(name)

    def of(self, computation: str, *opcodes: str) -> list[Instruction]:
        """The instructions of some kinds, also inside of fusions and loops."""
        return [one for one in self.everything(computation) if one.opcode in opcodes]

    def named(self, scope: str) -> Loop | None:
        """The outermost loop of a scope, None without one."""
        return next((loop for loop in self.loops() if scope in loop.scope), None)


def collectives(program: Program, computation: str = "") -> list[Instruction]:
    """The collectives of a computation, by default of the whole program."""
    return program.of(computation, *_COLLECTIVES)


def bytes_moved(program: Program, computation: str) -> int:
    """The bytes that the launches of a computation read and write, without a cache.

    Loops take one turn. Of an array from which or into which only rows are taken or put,
    these rows count.
    """
    found = {one.name: one for one in program.computations[computation]}
    total = 0
    for one in found.values():
        if one.opcode in _NESTED:
            total += sum(bytes_moved(program, name) for name in one.called)
        elif not one.is_free:
            total += _written(program, one, found) + _read(program, one, found)
    return total


def _written(program: Program, one: Instruction, found: dict[str, Instruction]) -> int:
    if one.opcode in _PUTS:
        return found[one.operands[_PUTS[one.opcode]]].num_bytes
    if one.opcode != "fusion":
        return one.num_bytes
    inside = {each.name: each for each in program.computations[one.called[0]]}
    root = list(inside.values())[-1]
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return min(one.num_bytes, sum(_written(program, each, inside) for each in results))


def _read(program: Program, one: Instruction, found: dict[str, Instruction]) -> int:
    read = [found[name].num_bytes for name in one.operands]
    if one.opcode in _PUTS:
        return sum(read[1:])
    if one.opcode in _TAKES:
        return min(read[0], one.num_bytes) + sum(read[1:])
    inside = program.computations[one.called[0]] if one.opcode == "fusion" else []
    for parameter in (each for each in inside if each.opcode == "parameter"):
        users = [each for each in inside if parameter.name in each.operands]
        if all(
            each.opcode in (*_TAKES, *_PUTS) and each.operands.index(parameter.name) == 0
            for each in users
        ):
            rows = sum(each.num_bytes for each in users if each.opcode in _TAKES)
            index = int(parameter.text.partition(")")[0])
            read[index] = min(read[index], rows)
    return sum(read)
