#!/usr/bin/env python3
"""Writes what the rungs measured, from dev/results/ladder.jsonl, into the line "Measured" of each
rung's header and into dev/attention/README.md's tables, between its markers.

    build/dev/attention/ladder forward --output=dev/results/ladder.jsonl
    python3 dev/attention/annotate.py

Of equal problems on a GPU the newest line counts, and of several GPUs the one measured last.
"""
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "ladder.jsonl"
T, MASK, HEAD_SIZES = 4096, "causal", (128, 64)


def newest():
    """{(pass, rung, HS): row} at T and MASK, and the name of the GPU, or None."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    rows = [row for row in map(json.loads, text.splitlines())
            if row["T"] == T and row["mask"] == MASK]
    device = rows[-1]["device"] if rows else None
    return {(row["pass"], row["rung"], row["HS"]): row for row in rows
            if row["device"] == device}, device


def share(row):
    percent = 100 * row["tflops"] / row["ceiling_tflops"]
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def measured(rows, device):
    figures = [f"HS={row['HS']} {row['tflops']:.3g} ({share(row)})" for row in rows]
    if not figures:
        return " * Measured: not yet. */"
    return f" * Measured ({device}, T={T}, {MASK}, TFLOP/s): {', '.join(figures)}. */"


def table(direction, files, rows, device):
    where = f"{device}, T={T}, {MASK}" if device else "not measured yet"
    ceilings = [row["ceiling_tflops"] for key, row in rows.items() if key[0] == direction]
    sizes = [hs for hs in HEAD_SIZES if any(key[0] == direction and key[2] == hs for key in rows)]
    if ceilings:
        where += (f"; the ceiling is cuBLASLt's product of 8192³, {min(ceilings):.0f} to "
                  f"{max(ceilings):.0f} TFLOP/s in these runs")
    out = [f"{direction.capitalize()} ({where}):", "",
           "| rung | | " + " | ".join(f"HS={hs}, TFLOP/s" for hs in sizes) + " |",
           "|---|---" + "|---" * len(sizes) + "|"]
    for path in files:
        title = re.match(r"/\* Rung \d+: (.*?)(?: \(|\.$)", path.read_text(), re.M)[1]
        cells = [rows.get((direction, path.stem, hs)) for hs in sizes]
        out.append(f"| [{path.stem}]({direction}/{path.name}) | {title} | " + " | ".join(
            f"{row['tflops']:.3g} ({share(row)})" if row else "" for row in cells) + " |")
    return out


def main():
    rows, device = newest()
    readme = HERE / "README.md"
    text = readme.read_text()
    for direction in ("forward", "backward"):
        files = sorted((HERE / direction).glob("*.cu"))
        for path in files:
            found = [rows[key] for key in ((direction, path.stem, hs) for hs in HEAD_SIZES)
                     if key in rows]
            source, count = re.subn(r"^ \* Measured\b.* \*/$", lambda _: measured(found, device),
                                    path.read_text(), flags=re.M)
            if count != 1:
                sys.exit(f"{path} needs one line that begins with \" * Measured\", and has {count}")
            path.write_text(source)
        block = "\n".join(table(direction, files, rows, device))
        text, count = re.subn(rf"(<!-- {direction} -->\n).*?(<!-- /{direction} -->)",
                              lambda m: m[1] + block + "\n" + m[2], text, flags=re.S)
        if count != 1:
            sys.exit(f"{readme} needs one <!-- {direction} --> block, and has {count}")
    readme.write_text(text)


main()
