"""Share between pictures: matplotlib without a display, colours, and figures as files or SVG text."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any, Dict, Sequence

from hwaware.errors import UnusableInputError
from hwaware.records import PathLike, write_bytes

STAGE_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
IDLE = "#d8d8d8"
INK = "#404040"
DOTS_PER_INCH = 130
# Taller pictures take gigabytes of memory, and some viewers cannot open them. In inches.
TALLEST = 200.0
# A line of small words, and what stands above and below the rows of a picture, in inches.
_LINE, _AROUND_ROWS = 0.135, 1.0
# Fonts of common systems with Chinese and Japanese characters, which matplotlib's own font lacks.
_EAST_ASIAN = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "Droid Sans Fallback", "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei", "IPAexGothic", "IPAGothic", "Microsoft YaHei", "Yu Gothic", "PingFang SC", "Hiragino Sans",
    "Arial Unicode MS",
)  # fmt: skip


def stage_colour(stage: int) -> str:
    """Return the colour of a stage, the same in every picture."""
    return STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def pyplot() -> Any:
    """Import matplotlib.pyplot, set up to draw into files only.

    Raises:
        UnusableInputError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UnusableInputError("matplotlib is not installed, pictures need it.", "pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: searchable, and small
    matplotlib.rcParams["text.parse_math"] = False  # names may have dollar signs
    from matplotlib import font_manager, pyplot

    installed = {font.name for font in font_manager.fontManager.ttflist}
    family = [*matplotlib.rcParams["font.family"], *(name for name in _EAST_ASIAN if name in installed)]
    matplotlib.rcParams["font.family"] = list(dict.fromkeys(family))
    return pyplot


def subplots(widths: Sequence[float], height: float, **options: Any) -> Any:
    """Return a figure and its panels side by side, with widths and height in inches."""
    return pyplot().subplots(
        1,
        len(widths),
        figsize=(sum(widths), min(TALLEST, height)),
        width_ratios=list(widths),
        layout="constrained",
        **options,
    )


def bare(axis: Any) -> None:
    """Remove the top and right sides of the frame."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def label(axis: Any, x: float, y: float, words: str, left: bool = False) -> None:
    """Write small words just right of a point, or left of it."""
    side = {"xytext": (-4, 0), "ha": "right"} if left else {"xytext": (4, 0), "ha": "left"}
    axis.annotate(words, (x, y), textcoords="offset points", va="center", fontsize=8, **side)


def shortened(name: str, most: int = 40) -> str:
    """Return a name, or its beginning and its end if it has more than `most` characters.

    Example:
        >>> shortened("node-017.a-long-name-of-a-domain.example.com:0", 20)
        'node-017.…ple.com:0'
    """
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def name_rows(axis: Any, names: Sequence[str], most: int = 60) -> range:
    """Give each row of a picture its name, from the top down, and return the rows with a name.

    If the picture is too low for all names, only every second row, third row, and so on has one. A longer line than
    `most` characters loses its middle.
    """
    lines = 1 + max((name.count("\n") for name in names), default=0)
    room = max(1, int((axis.figure.get_figheight() - _AROUND_ROWS) / (lines * _LINE)))
    places = range(0, len(names), max(1, -(-len(names) // room)))
    named = ["\n".join(shortened(line, most) for line in names[place].split("\n")) for place in places]
    axis.set_yticks(places, named, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    return places


def _written(figure: Any, **options: Any) -> bytes:
    """Return a figure as the content of a file.

    The function arranges panels and words once, since every format would solve for the same arrangement again. It drops
    warnings about characters that no font has. Text in SVG needs no font, and other pictures show a box.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from")
        if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        figure.savefig(drawn, **options)
    return drawn.getvalue()


def save(figure: Any, path: PathLike, close: bool = True) -> None:
    """Write a figure to a file of the format that the name's ending says, and close it by default.

    Raises:
        UnusableInputError: matplotlib does not know the ending, or the file cannot be written.
    """
    try:
        drawn = _written(figure, format=Path(path).suffix[1:], dpi=DOTS_PER_INCH)
    except (ValueError, RuntimeError) as error:  # an ending that matplotlib does not know, or .pgf without TeX
        raise UnusableInputError(
            f"{path} cannot be written as a picture: {error}.", "end the name in .png or .svg."
        ) from error
    finally:
        if close:
            pyplot().close(figure)
    write_bytes(path, drawn)


def _numbered_ids(text: str) -> str:
    """Replace ids that matplotlib hashes from coordinates by numbers.

    The layout solver leaves the last bits of coordinates open, so the hashes change from run to run.
    """
    numbers: Dict[str, str] = {}
    return re.sub(r"\b[pmh][0-9a-f]{10}\b", lambda found: numbers.setdefault(found[0], f"n{len(numbers)}"), text)


def svg_text(figure: Any, name: str) -> str:
    """Return a figure as an <svg> element for a page, and close it.

    Args:
        figure: The figure.
        name: Prefix of the element's ids, unique on the page.
    """
    plots = pyplot()
    with plots.rc_context({"svg.hashsalt": f"hwaware {name}"}):
        drawn = _written(figure, format="svg", metadata={"Date": None, "Creator": None})
    plots.close(figure)
    text = _numbered_ids(drawn.decode())
    # matplotlib calls elements axes_1, patch_2 and so on in every figure.
    return (
        text[text.index("<svg") :]
        .replace(' id="', f' id="{name}-')
        .replace('"#', f'"#{name}-')
        .replace("url(#", f"url(#{name}-")
    )
