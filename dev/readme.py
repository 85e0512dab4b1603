#!/usr/bin/env python3
"""Writes README.md's tables from dev/results/, between its markers.

    python3 dev/readme.py                     the tables
    python3 dev/readme.py --train LOG ...     first appends what `(time make train) > LOG 2>&1` said
                                              to dev/results/train.jsonl
"""
import csv
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "dev" / "results"


def lines(name):
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record_train(log):
    text = pathlib.Path(log).read_text()
    device = re.search(r"^(.+) \| ranks \d+ \| (\w+) \| attention (\w+)", text, re.M)
    best = re.search(r"^best validation loss ([\d.]+)", text, re.M)
    wall = re.search(r"^real\s+(\d+)m([\d.]+)s", text, re.M)
    steps = re.search(r"after (\d+) steps", text)
    if not (device and best and wall and steps):
        sys.exit(f"{log} is not the output of (time make train)")
    row = {"what": "train", "device": device[1], "type": device[2], "attention": device[3],
           "steps": int(steps[1]), "best_validation_loss": float(best[1]),
           "wall_seconds": round(60 * int(wall[1]) + float(wall[2]), 1)}
    with open(RESULTS / "train.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def train_table():
    newest = {row["device"]: row for row in lines("train.jsonl")}
    out = ["| on | steps | best validation loss | wall time |", "|---|---|---|---|"]
    for row in newest.values():
        out.append(f"| {row['device']}, {row['type']} | {row['steps']:,} "
                   f"| {row['best_validation_loss']:.4f} | {row['wall_seconds']:.0f} s |")
    return out


def bench_tables():
    out = []
    rows = lines("bench.jsonl")
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == device]
        newest = {(r["T"], r["attention"]): r for r in mine if r["what"] == "attention"}
        families = list(dict.fromkeys(family for _, family in newest))
        if newest:
            first = next(iter(newest.values()))
            out += ["", f"Attention on {device}, {first['type']}, causal, {first['NH']} heads of "
                    f"{first['HS']}, about {first['B'] * first['T']:,} tokens; TFLOP/s forward / "
                    "backward:", "", "| T | " + " | ".join(families) + " |",
                    "|---" * (len(families) + 1) + "|"]
            for T in dict.fromkeys(T for T, _ in newest):
                cells = [newest.get((T, family)) for family in families]
                out.append(f"| {T} | " + " | ".join(
                    f"{c['forward_tflops']:.3g} / {c['backward_tflops']:.3g}" if c else ""
                    for c in cells) + " |")
        steps = {(r["preset"], r["B"], r["T"], r["attention"]): r for r in mine
                 if r["what"] == "step"}
        for r in steps.values():
            mfu = f", {100 * r['mfu']:.1f}% of the peak" if r.get("mfu") else ""
            out += ["", f"A step of {r['preset']} on {device}, {r['type']}, B={r['B']}, T={r['T']}, "
                    f"{r['attention']}: {r['ms']:.1f} ms, {r['tokens_per_second']:,.0f} tokens/s"
                    f"{mfu}, {r['activation_bytes'] / 2**30:.1f} GiB of activations."]
    return out[1:]


def memory_table():
    with open(RESULTS / "memory.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    out = [f"One training step of a GPT with L={first['layers']}, NH={first['heads']}, "
           f"C={first['width']}, B=1 on {first['device']}, {first['type']}, until memory or "
           "patience runs out:", "", "| attention | longest T | its peak memory | ms a step | then |",
           "|---|---|---|---|---|"]
    for family in dict.fromkeys(row["attention"] for row in rows):
        mine = [row for row in rows if row["attention"] == family]
        last = [row for row in mine if row["outcome"] == "trained"][-1]
        ended = mine[-1]["outcome"].replace("_", " ") if mine[-1] is not last else ""
        out.append(f"| {family} | {int(last['T']):,} | {int(last['measured_bytes']) / 2**30:.1f} GiB "
                   f"| {float(last['ms']):,.0f} | {ended} |")
    return out + ["", "![memory and time against T](dev/results/memory.png)"]


def minimal_loop():
    return ["```c"] + (ROOT / "dev" / "minimal_loop.c").read_text().rstrip().splitlines() + ["```"]


def main():
    if sys.argv[1:2] == ["--train"]:
        for log in sys.argv[2:]:
            record_train(log)
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, make in {"train": train_table, "bench": bench_tables, "memory": memory_table,
                       "minimal_loop": minimal_loop}.items():
        block = "\n".join(make())
        text, found = re.subn(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
                              lambda m: m[1] + block + "\n" + m[2], text, flags=re.S)
        if found != 1:
            sys.exit(f"README.md needs one <!-- {name} --> block, and has {found}")
    readme.write_text(text)


main()
