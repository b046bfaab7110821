"""Draw cases that the bench has measured: how long a product takes, and how much of that is transfer.

matplotlib is imported when something is drawn, and drawn is into a file: no screen is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from mpi_matmul.storage import FileError, OutputFile


def check(path: str, others: Sequence[str] = ()) -> None:
    """ImportError without matplotlib, FileError if the file cannot be written or is one of ``others``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if not path.lower().endswith(".png"):
        raise FileError(path, "a plot is a PNG image, its name ends in .png")
    OutputFile(path, others)


def read_cases(path: str) -> list[dict[str, Any]]:
    """The cases of a JSON file that the bench has written; FileError if it is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            cases = json.load(stream)["cases"]
        for case in cases:
            _, products, transfers = _facts(case)
            if not (math.isfinite(products + transfers) and re.fullmatch(r"[\w<>|=]+", case["dtype"])):
                raise ValueError("numbers")
            _group(case)
        if not cases or not all(isinstance(case["strategy"], str) for case in cases):
            raise ValueError("nothing to draw")
    except OSError as error:
        raise FileError(path, str(error.strerror).lower()) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise FileError(path, "is not a report of the bench") from None
    return list(cases)


def _group(case: dict[str, Any]) -> str:
    m, k, n = (int(size) for size in case["shape"])
    return f"({m} x {k}) @ ({k} x {n}) {case['dtype']}"


def _facts(case: dict[str, Any]) -> tuple[str, float, float]:
    """What a bar is called, and seconds of its two parts: products, and transfers that they do not hide."""
    ranks, taken = int(case["ranks"]), float(case["seconds_median"])
    over = max(0.0, taken - float(case["compute_only_seconds"])) if case["sent_bytes"] else 0.0
    return f"{case['strategy']}\n{ranks} {'rank' if ranks == 1 else 'ranks'}", taken - over, over


def draw(cases: Sequence[dict[str, Any]], path: str) -> None:
    """A PNG image: for each product of these a group of bars, one for each strategy and number of ranks."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(_group(case), []).append(case)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(1.5 + sum(1.5 + 0.8 * len(group) for group in groups.values()), 4.8)
    )
    ratios = [1 + len(group) for group in groups.values()] or [1]
    axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    for place, (title, group) in zip(axes, groups.items(), strict=False):
        _bars(place, title, sorted(group, key=lambda case: (case["strategy"], case["ranks"])))
    axes[0].set_ylabel("seconds (median)")
    axes[0].legend()
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    OutputFile(path).write_bytes(image.getvalue())


def _bars(axes: Any, title: str, cases: Sequence[dict[str, Any]]) -> None:
    names, products, transfers = zip(*map(_facts, cases), strict=True)
    places = range(len(names))
    axes.bar(places, products, color="tab:blue", label="product")
    axes.bar(places, transfers, bottom=products, color="tab:orange", label="transfer that is not hidden")
    axes.set_xticks(places, names)
    axes.set_title(title, fontsize=9)
