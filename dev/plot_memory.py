"""Draws dev/results/memory.csv: peak memory and time of a training step against T.

    python3 dev/plot_memory.py CSV [PNG]      PNG: the CSV's name with .png
"""

import csv
import os
import sys

from picture import COLOURS, plt, save, tidy

from matplotlib.ticker import FuncFormatter, NullLocator

ENDS = {"out_of_memory": "until out of memory", "too_slow": "until too slow"}


def read(path):
    """The rows of each kind of attention, in the file's order."""
    families = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            families.setdefault(row["attention"], []).append(row)
    return families


def binary(value, units):
    """1536, ("", "k", "M") -> "1.5k"."""
    i = 0
    while value >= 1024 and i + 1 < len(units):
        value /= 1024
        i += 1
    return f"{value:g}{units[i]}"


def milliseconds(value, _):
    return f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"


def powers(low, high, step):
    """The powers of `step` that span [low, high]."""
    ticks = [1]
    while ticks[0] > low:
        ticks.insert(0, ticks[0] / step)
    while ticks[-1] < high:
        ticks.append(ticks[-1] * step)
    return [t for t in ticks if low / step < t < high * step]


def log_axes(axes, lengths, title):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: binary(v, ("", "k", "M"))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length T")
    tidy(axes, title)


def draw_memory(axes, families, device_bytes):
    values = [device_bytes]
    for (name, rows), colour in zip(families.items(), COLOURS):
        trained = [r for r in rows if r["outcome"] == "trained"]
        length = [int(r["T"]) for r in trained]
        planned = [int(r["planned_bytes"]) for r in trained]
        measured = [int(r["measured_bytes"]) for r in trained]
        axes.plot(length, planned, color=colour, linewidth=1.8, label=f"{name}, planned")
        axes.plot(length, measured, "o", color=colour, markersize=5.5, label=f"{name}, measured")
        values += planned + measured
        for row in rows:
            if row["outcome"] != "out_of_memory" or not trained:
                continue
            stop, wanted = int(row["T"]), int(row["planned_bytes"])
            axes.plot([length[-1], stop], [planned[-1], wanted], ":", color=colour, linewidth=1.8)
            axes.plot(stop, wanted, "x", color=colour, markersize=8, markeredgewidth=2)
            axes.annotate("out of memory", (stop, wanted), (8, 0), textcoords="offset points",
                          color=colour, fontsize=9, va="center")
            values.append(wanted)
    axes.axhline(device_bytes, color="0.4", linestyle="--", linewidth=1)
    axes.annotate("memory of the device", (0.02, device_bytes), (0, 3),
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points", color="0.4",
                  fontsize=9)
    axes.set_yticks(powers(min(values), max(values), 4))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: binary(v, (" B", " KiB", " MiB", " GiB", " TiB"))))
    axes.set_ylim(min(values) / 1.5, max(values) * 2)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def draw_time(axes, families):
    values = []
    for (name, rows), colour in zip(families.items(), COLOURS):
        trained = [r for r in rows if r["outcome"] == "trained"]
        if not trained:
            continue
        length = [int(r["T"]) for r in trained]
        ms = [float(r["ms"]) for r in trained]
        end = ENDS.get(rows[-1]["outcome"])
        axes.plot(length, ms, "o-", color=colour, linewidth=1.8, markersize=5.5,
                  label=f"{name}, {end}" if end else name)
        values += ms
    axes.set_yticks(powers(min(values), max(values), 10))
    axes.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    axes.set_ylim(min(values) / 1.8, max(values) * 1.8)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    source = sys.argv[1]
    picture = sys.argv[2] if len(sys.argv) == 3 else os.path.splitext(source)[0] + ".png"
    families = read(source)
    rows = [row for family in families.values() for row in family]
    if not any(row["outcome"] == "trained" for row in rows):
        sys.exit(f"{source}: no case trained, so there is nothing to draw")

    lengths = sorted({int(row["T"]) for row in rows})
    first = rows[0]
    figure, (memory, time) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    log_axes(memory, lengths, "Peak memory of a training step")
    log_axes(time, lengths, "Time of a training step")
    draw_memory(memory, families, int(first["device_bytes"]))
    draw_time(time, families)
    for axes in (memory, time):
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.6)
    figure.suptitle("{device}, {type}: GPT with L={layers}, NH={heads}, C={width}, V={vocabulary}, "
                    "B=1".format(**first), x=0.01, ha="left", fontsize=12)
    save(figure, picture)


if __name__ == "__main__":
    main()
