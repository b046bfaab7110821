"""A picture in SVG: the few shapes that `mpi_matmul.draw` needs, as text that is always the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

STRIPE = 6
CHIP_RADIUS = 10
# The card has a colour of its own, so that its text is legible on a page of any colour.
STYLE = """
text { font: 12px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 17px; font-weight: 600 }
.heading { font-size: 13px; font-weight: 600 }
.name { font-size: 15px; font-weight: 600; font-style: italic }
.on { font-size: 11px; font-weight: 600; fill: #1f2328; text-anchor: middle }
.middle { text-anchor: middle }
.card { fill: #ffffff; stroke: #d1d9e0 }
.empty { fill: #f0f2f5; stroke: #c3cad1 }
.part, .chip, .arrow { stroke: #1f2328; stroke-width: .7 }
.own { stroke: #1f2328; stroke-width: 2.6; fill: none }
.items { stroke: #57606a; stroke-opacity: .3; stroke-width: .6; fill: none }
.pill { fill: #ffffff; fill-opacity: .86 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .on { fill: #1f2328 }
  .card { fill: #0d1117; stroke: #3d444d }
  .empty { fill: #1c2129; stroke: #4a525c }
  .own { stroke: #ffffff }
}
"""


@dataclass(frozen=True)
class Box:
    """A rectangle on the picture."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass
class Svg:
    """Shapes are added in the order in which they lie above each other."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)
    stripes: dict[str, Sequence[str]] = field(default_factory=dict)

    def box(self, box: Box, kind: str, colours: Sequence[str] = (), corner: int = 0) -> None:
        """A rectangle, striped if it has several colours."""
        corners = f' rx="{corner}"' if corner else ""
        sizes = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        self.shapes.append(f'<rect class="{kind}" {sizes}{corners}{self._fill(colours)}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """With its baseline at ``y``."""
        kinds = f' class="{kind}"' if kind else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{kinds}>{escape(text)}</text>')

    def chip(self, x: float, y: float, text: str, colour: str) -> None:
        """A disc with a few letters in it."""
        place = f'cx="{x:g}" cy="{y:g}" r="{CHIP_RADIUS}"'
        self.shapes.append(f'<circle class="chip" {place}{self._fill([colour])}/>')
        self.text(x, y + 4, text, "on")

    def label(self, box: Box, text: str) -> None:
        """In the middle of a box, whatever its colours are."""
        x, y = box.middle
        width = 7 * len(text) + 6
        if width > 20:
            self.box(Box(x - width / 2, y - 8, width, 16), "pill", corner=8)
        self.text(x, y + 4, text, "on")

    def items(self, box: Box, unit: int) -> None:
        """Lines between the numbers of a matrix."""
        across = (f"M{box.x:g} {y}H{box.right:g}" for y in range(int(box.y) + unit, int(box.bottom), unit))
        down = (f"M{x} {box.y:g}V{box.bottom:g}" for x in range(int(box.x) + unit, int(box.right), unit))
        self.shapes.append(f'<path class="items" d="{"".join([*across, *down])}"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colours: Sequence[str]) -> None:
        """Along an axis, with a head at its end."""
        (x, y), (to_x, to_y) = start, end
        size = abs(to_x - x) + abs(to_y - y)
        along = ((to_x - x) / size, (to_y - y) / size)
        outline = [(0, 3), (size - 9, 3), (size - 9, 7), (size, 0), (size - 9, -7), (size - 9, -3), (0, -3)]
        points = [
            (x + far * along[0] - off * along[1], y + far * along[1] + off * along[0]) for far, off in outline
        ]
        listed = " ".join(f"{px:g},{py:g}" for px, py in points)
        self.shapes.append(f'<polygon class="arrow" points="{listed}"{self._fill(colours)}/>')

    def _fill(self, colours: Sequence[str]) -> str:
        if len(colours) < 2:
            return "".join(f' fill="{colour}"' for colour in colours)
        name = "-".join(colour.strip("#") for colour in colours)
        self.stripes[name] = colours
        return f' fill="url(#{name})"'

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            *(_gradient(name, colours) for name, colours in sorted(self.stripes.items())),
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _gradient(name: str, colours: Sequence[str]) -> str:
    """Diagonal stripes of these colours, over and over."""
    edges = [f"{number / len(colours):.4g}" for number in range(len(colours) + 1)]
    stops = "".join(
        f'<stop offset="{edge}" stop-color="{colour}"/>'
        for number, colour in enumerate(colours)
        for edge in edges[number : number + 2]
    )
    end = STRIPE * len(colours)
    ends = f'x1="0" y1="0" x2="{end}" y2="{end}"'
    return (
        f'<linearGradient id="{name}" gradientUnits="userSpaceOnUse" spreadMethod="repeat" {ends}>'
        f"{stops}</linearGradient>"
    )
