"""Draws what runs logged: loss, learning rate, gradient norm and speed against the step.

    python3 dev/plot.py RUN… [--output=PNG]      RUN: a run's directory, or its log.csv

Without --output the picture of one run is RUN/curves.png, that of several curves.png here.
"""

import argparse
import csv
import pathlib
import sys

from picture import COLOURS, plt, save, tidy

import numpy
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLUMNS = ("loss", "norm", "lr", "tokens_per_second")


def read(path):
    """{"train": columns, "validation": columns} of one log."""
    rows = {"train": [], "validation": []}
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if row["split"] in rows:
                    rows[row["split"]].append(
                        [int(row["step"])] + [float(row[c] or "nan") for c in COLUMNS])
    except (OSError, KeyError, TypeError, ValueError) as problem:
        sys.exit(f"{path} is not the log of a run: {problem!r}")
    if not rows["train"]:
        sys.exit(f"{path} has no step yet")
    return {split: dict(zip(("step",) + COLUMNS, numpy.array(table, ndmin=2).T))
            for split, table in rows.items() if table}


def running(values, how):
    """`how` (a mean or a median) of the values around each one: a fiftieth of them all."""
    half = max(1, len(values) // 100)
    return numpy.array([how(values[max(0, i - half):i + half + 1]) for i in range(len(values))])


def thousands(value, _):
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def draw_noisy(axes, table, column, how, colour, label=None):
    """The steps as they were, faint, and what they come to."""
    middle = running(table[column], how)
    axes.plot(table["step"], table[column], color=colour, alpha=0.25, linewidth=0.6)
    axes.plot(table["step"], middle, color=colour, linewidth=1.6, label=label)
    return middle


def draw_losses(axes, runs):
    tops, bottoms = [], []
    for (name, log), colour in zip(runs, COLOURS):
        middle = draw_noisy(axes, log["train"], "loss", numpy.mean, colour, f"{name}, training")
        tops.append(numpy.nanmax(middle))
        bottoms.append(numpy.nanmin(log["train"]["loss"]))
        if "validation" in log:
            table = log["validation"]
            axes.plot(table["step"], table["loss"], "o--", color=colour, markersize=4.5,
                      linewidth=1.2, markeredgecolor="white", label=f"{name}, validation")
            tops.append(table["loss"].max())
            bottoms.append(table["loss"].min())
    margin = 0.05 * (max(tops) - min(bottoms)) or 1
    axes.set_ylim(min(bottoms) - margin, max(tops) + margin)
    axes.legend(frameon=False, fontsize=9)


def draw(runs):
    figure, ((loss, lr), (norm, speed)) = plt.subplots(2, 2, figsize=(12, 7.2), sharex=True,
                                                       layout="constrained")
    draw_losses(loss, runs)
    norms, speeds = [], []
    for (_, log), colour in zip(runs, COLOURS):
        table = log["train"]
        lr.plot(table["step"], table["lr"], color=colour, linewidth=1.6)
        draw_noisy(norm, table, "norm", numpy.median, colour)
        middle = draw_noisy(speed, table, "tokens_per_second", numpy.median, colour)
        norms.append(numpy.nanpercentile(table["norm"], 99))
        speeds.append(numpy.nanmax(middle))
    norm.set_ylim(0, 1.25 * max(norms) or 1)  # a few spikes must not press the rest flat
    speed.set_ylim(0, 1.25 * max(speeds) or 1)
    lr.set_ylim(0)
    lr.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    speed.yaxis.set_major_formatter(FuncFormatter(thousands))
    for axes, title in ((loss, "Loss"), (lr, "Learning rate"), (norm, "Gradient norm"),
                        (speed, "Tokens a second")):
        tidy(axes, title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0)
    for axes in (norm, speed):
        axes.set_xlabel("step")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--output", metavar="PNG", type=pathlib.Path)
    options = parser.parse_args()
    if len(options.runs) > len(COLOURS):
        sys.exit(f"at most {len(COLOURS)} runs can be told apart in one picture")
    runs = []
    for name in options.runs:
        path = pathlib.Path(name)
        log = path / "log.csv" if path.is_dir() else path
        runs.append((log.resolve().parent.name, read(log)))
    alone = log.parent / "curves.png" if len(runs) == 1 else pathlib.Path("curves.png")
    save(draw(runs), options.output or alone)


if __name__ == "__main__":
    main()
