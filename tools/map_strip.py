"""A row of the map as a small picture (SVG): a method's difference from FedAvg by kind of shift."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

# Blue and orange differ for all kinds of colour vision (Okabe and Ito); the marks differ in shape.
_STYLE = """
text{font:11px sans-serif;fill:#24292f}.back{fill:#fff}.grid{stroke:#d8dee4}.zero{stroke:#57606a}
.test{fill:#0072b2;stroke:#0072b2}.worst{fill:none;stroke:#d55e00}.bold{font-weight:bold}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117}.grid{stroke:#3d444d}
.zero{stroke:#9198a1}.test{fill:#56b4e9;stroke:#56b4e9}.worst{stroke:#e69f00}}
""".strip()
_WIDTH, _LEFT, _RIGHT, _TOP, _LINE = 400, 148, 348, 44, 22
_MINUS = chr(0x2212)
_UP, _DOWN = 4, 5  # from the middle of a line to its two marks


class Point(NamedTuple):
    """A kind of shift. A value that is NaN is not drawn."""

    name: str
    value: float
    low: float  # the ends of the interval
    high: float
    worst: float  # the same value of the worst domain
    is_marked: bool = False  # whether its number is bold


class Axis(NamedTuple):
    """The values that a strip shows; those beyond have an arrow at the end."""

    low: float
    high: float
    step: float  # between ticks
    form: str  # of numbers

    def x(self, value: float) -> float:
        """The place of a value in the picture, at most at the ends of the axis."""
        inside = min(max(value, self.low), self.high)
        return _LEFT + (_RIGHT - _LEFT) * (inside - self.low) / (self.high - self.low)


POINTS = Axis(-20, 20, 10, "+z.1f")
PERCENT = Axis(0, 100, 25, ".1f")


def strip(title: str, points: Sequence[Point], axis: Axis = POINTS) -> str:
    """The picture as the text of an SVG file."""
    bottom = _TOP + _LINE * len(points)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 22}" '
        f'width="{_WIDTH}" height="{bottom + 22}" role="img">'
    )
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{bottom + 22}" rx="4"/>',
            f'<text class="bold" x="8" y="16">{escape(title)}</text>',
            *_legend(axis),
            *_grid(axis, bottom),
            *(line for at, point in enumerate(points) for line in _row(point, at, axis)),
            "</svg>",
            "",
        ]
    )


def _legend(axis: Axis) -> Iterator[str]:
    yield '<line class="test" x1="8" y1="30" x2="28" y2="30" stroke-width="2"/>'
    yield '<circle class="test" cx="18" cy="30" r="4"/>'
    yield '<text x="33" y="34">test, 95% interval</text>'
    yield _diamond(148, 30)
    yield '<text x="157" y="34">worst domain</text>'
    if axis is POINTS:
        words = '<tspan class="bold">bold</tspan>: better or worse'
        yield f'<text x="{_WIDTH - 8}" y="34" text-anchor="end">{words}</text>'


def _grid(axis: Axis, bottom: float) -> Iterator[str]:
    for index in range(round((axis.high - axis.low) / axis.step) + 1):
        tick = axis.low + index * axis.step
        kind = "zero" if tick == 0 else "grid"
        x = axis.x(tick)
        yield f'<line class="{kind}" x1="{x:g}" y1="{_TOP - 2}" x2="{x:g}" y2="{bottom}"/>'
        text = f"{tick:{'+g' if axis is POINTS and tick else 'g'}}".replace("-", _MINUS)
        yield f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{text}</text>'


def _row(point: Point, at: int, axis: Axis) -> Iterator[str]:
    y = _TOP + _LINE * (at + 0.5)
    yield f'<text x="{_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{escape(point.name)}</text>'
    if not math.isfinite(point.value):
        return
    if point.low < axis.high and point.high > axis.low:
        place = f'x1="{axis.x(point.low):.1f}" x2="{axis.x(point.high):.1f}"'
        yield f'<line class="test" {place} y1="{y - _UP:g}" y2="{y - _UP:g}" stroke-width="2"/>'
    yield from _mark("test", axis, point.value, y - _UP)
    yield from _mark("worst", axis, point.worst, y + _DOWN)
    kind = ' class="bold"' if point.is_marked else ""
    number = f"{point.value:{axis.form}}".replace("-", _MINUS)
    yield f'<text{kind} x="{_WIDTH - 8}" y="{y + 4:g}" text-anchor="end">{number}</text>'


def _mark(kind: str, axis: Axis, value: float, y: float) -> Iterator[str]:
    """A circle or a diamond; beyond the axis an arrow at its end; nothing for NaN."""
    x = axis.x(value)
    if axis.low <= value <= axis.high:
        circle = f'<circle class="test" cx="{x:.1f}" cy="{y:g}" r="4"/>'
        yield circle if kind == "test" else _diamond(x, y)
    elif math.isfinite(value):
        sign = 1 if value > axis.high else -1
        path = f"M{x:.1f} {y:g}l{-sign * 8} -4l0 8z"
        yield f'<path class="{kind}" d="{path}" stroke-width="1.5"/>'


def _diamond(x: float, y: float) -> str:
    path = f"M{x - 4.5:.1f} {y:g}l4.5 -4.5l4.5 4.5l-4.5 4.5z"
    return f'<path class="worst" d="{path}" stroke-width="1.5"/>'
