#!/usr/bin/env python3
"""Writes the tables of README.md and attention/README.md from dev/results/, between their markers.

    python3 dev/readme.py                     the tables
    python3 dev/readme.py --train LOG ...     first appends what `(time make train) > LOG 2>&1` said
                                              to dev/results/train.jsonl
"""
import csv
import json
import math
import pathlib
import re
import statistics
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


def newest(rows, *key):
    """The last row of each key."""
    return {tuple(row[k] for k in key): row for row in rows}


def by_device(rows):
    for device in dict.fromkeys(row["device"] for row in rows):
        yield device, [row for row in rows if row["device"] == device]


def commits(rows):
    """Of which source these are."""
    return "commit " + " and ".join(dict.fromkeys(row["commit"] for row in rows))


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


PASSES = ("forward", "backward")
OURS = {"tilegpt:auto": "default", "tilegpt:auto+deterministic": "deterministic",
        "tilegpt:flash_mma": "`flash_mma`"}


def attention_tables():
    """What dev/compare_attention.py recorded: 24 cells of equal width, and the trainer's shape."""
    out = []
    rows = newest(lines("attention.jsonl"), "device", "HS", "mask", "T", "B", "NH").values()
    for device, mine in by_device(rows):
        first = mine[0]
        width = first["NH"] * first["HS"]
        cells = [row for row in mine if row["NH"] * row["HS"] == width]
        lengths = sorted({row["T"] for row in cells})
        cudnn = first["cudnn"]
        tokens = first["B"] * first["T"]
        out += ["", f"Attention on {device}, {first['type']}, {tokens:,} tokens of "
                f"{width} channels: TFLOP/s, and in brackets the speed over the faster of PyTorch "
                f"{first['torch']}'s FA2 and cuDNN "
                f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100} in the same run "
                f"({commits(mine)}):", "",
                "| HS | mask | pass | " + " | ".join(f"T={T:,}" for T in lengths) + " |",
                "|---" * (3 + len(lengths)) + "|"]

        def figure(row, pass_):
            ours = row["results"]["tilegpt:auto"]
            return f"{ours[pass_ + '_tflops']:.0f} ({ours[pass_ + '_ratio']:.3f})"

        for HS, mask in dict.fromkeys((row["HS"], row["mask"]) for row in cells):
            at = {row["T"]: row for row in cells if (row["HS"], row["mask"]) == (HS, mask)}
            for pass_ in PASSES:
                out.append(f"| {HS} | {mask} | {pass_} | " + " | ".join(
                    figure(at[T], pass_) if T in at else "" for T in lengths) + " |")
        for row in mine:
            if row not in cells:
                out += ["", f"At the trainer's shape, B={row['B']}, NH={row['NH']}, T={row['T']}, "
                        f"HS={row['HS']}, {row['mask']}: {figure(row, 'forward')} forward, "
                        f"{figure(row, 'backward')} backward."]

        out += ["", f"Geometric means of the speed over these {len(cells)} cells, forward / "
                "backward:", "",
                "| | over the faster of both | in how many cells at least 1 | over FA2 | "
                "over the default |", "|---|---|---|---|---|"]
        for name, title in OURS.items():
            got = [row["results"][name] for row in cells if name in row["results"]]
            default = [row["results"]["tilegpt:auto"] for row in cells if name in row["results"]]
            if not got:
                continue

            def means(suffix):
                return " / ".join(f"{geometric_mean(r[p + suffix] for r in got):.3f}"
                                  for p in PASSES)

            wins = " / ".join(str(sum(r[p + "_ratio"] >= 1 for r in got)) for p in PASSES)
            own = " / ".join(
                f"{geometric_mean(d[p + '_ms'] / r[p + '_ms'] for r, d in zip(got, default)):.3f}"
                for p in PASSES)
            out.append(f"| {title} | {means('_ratio')} | {wins} | {means('_ratio_fa2')} | {own} |")
        families = sorted({row["results"]["tilegpt:auto"]["family"] for row in mine})
        errors = [row["results"]["tilegpt:auto"]["error_ratio"] for row in mine]
        out += ["", f"The default is {', '.join(f'`{f}`' for f in families)}. Its error against "
                f"float64 is {min(errors):.3f} to {max(errors):.3f} of cuDNN's."]
    return out[1:] + ["", "![TFLOP/s against T, beside PyTorch's](dev/results/attention.png)"]


def step_tables():
    out = []
    rows = [row for row in lines("bench.jsonl") if row["what"] == "step"]
    for device, mine in by_device(rows):
        for preset in dict.fromkeys(row["preset"] for row in mine):
            steps = newest([row for row in mine if row["preset"] == preset], "B", "T").values()
            last = list(steps)[-1]
            out += ["", f"A training step of {preset} on {device}, {last['type']} "
                    f"({commits(steps)}):", "",
                    "| B | T | attention | ms | tokens/s | of the peak | activations |",
                    "|---|---|---|---|---|---|---|"]
            for r in sorted(steps, key=lambda row: row["T"]):
                mfu = f"{100 * r['mfu']:.1f}%" if r.get("mfu") else ""
                out.append(f"| {r['B']} | {r['T']:,} | `{r['attention']}` | {r['ms']:.1f} "
                           f"| {r['tokens_per_second']:,.0f} | {mfu} "
                           f"| {r['activation_bytes'] / 2**30:.1f} GiB |")
    return out[1:]


def sample_tables():
    out = []
    rows = [row for row in lines("bench.jsonl") if row["what"] == "sample"]
    for device, mine in by_device(rows):
        for preset in dict.fromkeys(row["preset"] for row in mine):
            of = newest([row for row in mine if row["preset"] == preset], "B").values()
            out += ["", f"Sampling from {preset} on {device}, {list(of)[-1]['type']} "
                    f"({commits(of)}):", "",
                    "| texts at once | ms a step | tokens/s | ms to read the weights once |",
                    "|---|---|---|---|"]
            for r in sorted(of, key=lambda row: row["B"]):
                out.append(f"| {r['B']} | {r['ms']:.2f} | {r['tokens_per_second']:,.0f} "
                           f"| {r['reading_ms']:.2f} |")
    return out[1:]


def io_tables():
    """What dev/attention/io_report.py recorded."""
    out = []
    rows = newest(lines("io.jsonl"), "device", "mask", "B", "NH", "T", "HS", "family", "pass")
    for device, mine in by_device(rows.values()):
        for shape in dict.fromkeys((r["mask"], r["B"], r["NH"], r["T"], r["HS"]) for r in mine):
            mask, B, NH, T, HS = shape
            of = [r for r in mine if (r["mask"], r["B"], r["NH"], r["T"], r["HS"]) == shape]
            out += ["", f"On {device}, {mine[0]['type']}, {mask}, B={B}, NH={NH}, T={T}, HS={HS}, "
                    f"in MB of 10⁶ bytes ({commits(of)}):", "",
                    "| family | pass | each tensor once | by the algorithm | asked of the L2 "
                    "| DRAM read | DRAM written | ms |", "|---|---|---|---|---|---|---|---|"]
            for r in of:
                megabytes = " | ".join(f"{r[name + '_bytes'] / 1e6:,.0f}" for name in
                                       ("minimum", "algorithm", "l2", "dram_read", "dram_written"))
                out.append(f"| {r['family']} | {r['pass']} | {megabytes} | {r['ms']:.2f} |")
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
        ended = (mine[-1]["outcome"].replace("_", " ") if mine[-1] is not last
                 else "longer was not tried")
        out.append(f"| {family} | {int(last['T']):,} | {int(last['measured_bytes']) / 2**30:.1f} GiB "
                   f"| {float(last['ms']):,.0f} | {ended} |")
    return out + ["", "![memory and time against T](dev/results/memory.png)"]


def minimal_loop():
    return ["```c"] + (ROOT / "dev" / "minimal_loop.c").read_text().rstrip().splitlines() + ["```"]


FILES = {
    "README.md": {"train": train_table, "attention": attention_tables, "step": step_tables,
                  "sample": sample_tables, "memory": memory_table, "minimal_loop": minimal_loop},
    "attention/README.md": {"io": io_tables},
}


def main():
    if sys.argv[1:2] == ["--train"]:
        for log in sys.argv[2:]:
            record_train(log)
    for path, blocks in FILES.items():
        text = (ROOT / path).read_text()
        for name, make in blocks.items():
            block = "\n".join(make())
            text, found = re.subn(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
                                  lambda m: m[1] + block + "\n" + m[2], text, flags=re.S)
            if found != 1:
                sys.exit(f"{path} needs one <!-- {name} --> block, and has {found}")
        (ROOT / path).write_text(text)


main()
