#!/usr/bin/env python3
"""The bytes that attention moves, by the algorithm and as the GPU counts them, naive against flash.

    make && python3 dev/attention/io_report.py [--lengths=1024,4096] [--head-size=128] [--mask=full]

For each length, one run of build/dev/attention/io_report under ncu. Prints a table and appends one
JSON line for each pass to dev/results/io.jsonl.

    minimum     each tensor read or written once
    algorithm   what the tiles ask for (dev/attention/io_model.h)
    L2          what the multiprocessors asked of the L2: to be held against `algorithm`
    L2 all      all traffic of the L2: also between its halves, and with DRAM
    DRAM        read and written: to be held against `minimum`

ncu empties the caches before each kernel, so a kernel cannot find in the L2 what the one before it
left there, and the last of what a kernel writes stays in the L2, uncounted. It needs permission to
read the GPU's counters.
"""
import argparse
import csv
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SECTOR = 32  # bytes
TIME, READ, WRITTEN, L2_ALL = ("gpu__time_duration.sum", "dram__bytes_read.sum",
                               "dram__bytes_write.sum", "lts__t_bytes.sum")
L2 = "lts__t_sectors_srcunit_tex.sum"
METRICS = [TIME, READ, WRITTEN, L2_ALL, L2]
MB = 1e6


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="1024,4096", help="T, separated by commas")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--mask", choices=["full", "causal"], default="full")
    parser.add_argument("--families", default="naive,flash_v1,flash_mma,flash_hopper")
    parser.add_argument("--program", default=str(ROOT / "build/dev/attention/io_report"))
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--output", default=str(ROOT / "dev/results/io.jsonl"))
    parser.add_argument("--commit", help="to record; default: what git says")
    return parser.parse_args()


def run_ncu(options, T, metrics=METRICS):
    """What the program printed, and one dictionary of metrics for each kernel, in order."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        command = [options.ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv",
                   "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics),
                   "--log-file", str(log), options.program, f"--run={options.families}",
                   f"--length={T}", f"--head-size={options.head_size}", f"--mask={options.mask}",
                   "--device=cuda"]
        done = subprocess.run(command, capture_output=True, text=True)
        written = log.read_text() if log.exists() else ""
    if done.returncode != 0:
        said = done.stdout + done.stderr + written[-2000:]
        known = [name for name in metrics if not re.search(f"metric.*{re.escape(name)}", said)]
        if len(known) < len(metrics) and known:  # another GPU's counters have other names
            return run_ncu(options, T, known)
        sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{said}")
    table = [line for line in written.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(table))[1:]  # the first row holds the units
    return done.stdout, [{name: number(row.get(name)) for name in METRICS} for row in rows]


def commit():
    command = ["git", "-C", str(ROOT), "--no-optional-locks", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def number(text):
    """None for what ncu could not measure."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def total(kernels, name, factor=1):
    values = [kernel[name] for kernel in kernels]
    return None if not values or None in values else factor * sum(values)


def passes(printed, kernels, recorded):
    """The program's lines, each with the sums over its kernels."""
    common, used = {}, 0
    for line in printed.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if "refused" in fields:
            print(line.replace("refused=", "does not run: ").replace("family=", ""))
        elif "device" in fields:
            common = {**fields, "device": line.split("device=")[1]}
        elif "kernels" in fields:
            mine = kernels[used:used + int(fields["kernels"])]
            used += len(mine)
            yield {"what": "io", "commit": recorded, "device": common["device"],
                   "type": common["type"], "B": int(common["B"]), "NH": int(common["NH"]),
                   "family": fields["family"],
                   "pass": fields["pass"], "kernels": int(fields["kernels"]),
                   "minimum_bytes": int(fields["minimum_bytes"]),
                   "algorithm_bytes": int(fields["algorithm_bytes"]),
                   "operations": int(fields["operations"]),
                   "l2_bytes": total(mine, L2, SECTOR), "l2_all_bytes": total(mine, L2_ALL),
                   "dram_read_bytes": total(mine, READ), "dram_written_bytes": total(mine, WRITTEN),
                   "ms": total(mine, TIME, 1e-6)}
    if used != len(kernels):
        print(f"ncu saw {len(kernels)} kernels, but the passes launched {used}: "
              "the sums are of others")


def megabytes(value):
    return f"{'n/a':>10}" if value is None else f"{value / MB:10.1f}"


def print_rows(rows):
    print(f"{'':12} {'pass':8} {'kernels':>7} {'minimum':>10} {'algorithm':>10} {'L2':>10} "
          f"{'L2 all':>10} {'DRAM read':>10} {'written':>10} {'ms':>9}   (MB = 10^6 bytes)")
    for row in rows:
        ms = "n/a" if row["ms"] is None else f"{row['ms']:.3f}"
        print(f"{row['family']:12} {row['pass']:8} {row['kernels']:7} "
              + " ".join(megabytes(row[name]) for name in
                         ["minimum_bytes", "algorithm_bytes", "l2_bytes", "l2_all_bytes",
                          "dram_read_bytes", "dram_written_bytes"]) + f" {ms:>9}")


def dram(row):
    parts = [row["dram_read_bytes"], row["dram_written_bytes"]]
    return None if None in parts else sum(parts)


def print_ratios(rows):
    naive = {row["pass"]: row for row in rows if row["family"] == "naive"}
    for row in rows:
        base = naive.get(row["pass"])
        if base is None or row is base:
            continue
        parts = []
        for name, value, reference in [("DRAM", dram(row), dram(base)),
                                       ("L2", row["l2_bytes"], base["l2_bytes"]),
                                       ("time", row["ms"], base["ms"])]:
            if value and reference:
                parts.append(f"{name} {reference / value:.1f}")
        if parts:
            print(f"naive over {row['family']}, {row['pass']}: {', '.join(parts)}")


def main():
    options = arguments()
    if not shutil.which(options.ncu):
        sys.exit(f"{options.ncu} is not found; it is Nsight Compute's, of the CUDA toolkit")
    if not pathlib.Path(options.program).exists():
        sys.exit(f"{options.program} is not built; `make {options.program}` builds it")
    for T in map(int, options.lengths.split(",")):
        rows = [{**row, "T": T, "HS": options.head_size, "mask": options.mask}
                for row in passes(*run_ncu(options, T), options.commit or commit())]
        if not rows:
            continue
        first = rows[0]
        print(f"\n{first['device']}, T={T} HS={options.head_size} {options.mask}, B={first['B']} "
              f"NH={first['NH']}, {first['type']}\n")
        print_rows(rows)
        print_ratios(rows)
        with open(options.output, "a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    print(f"\nappended to {options.output}")


if __name__ == "__main__":
    main()
