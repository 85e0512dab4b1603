#!/usr/bin/env python3
"""Attention side by side: tilegpt's, and PyTorch's FlashAttention-2, cuDNN and naive backends.

    make lib && python3 dev/compare_attention.py            # 25 cells, about a minute and a half
    python3 dev/compare_attention.py --quick                # 5 cells
    python3 dev/compare_attention.py --family=auto,flash_mma,auto+deterministic --head-size=128
    python3 dev/compare_attention.py --draw                 # only the picture, of what is recorded

bf16. The cells are head sizes 64 and 128, causal and full, T = 512 … 16,384 at 16,384 tokens of
2048 channels in all, and the trainer's own shape. Prints a table, appends one JSON line for each
cell to dev/results/attention.jsonl and draws dev/results/attention.png. Ends with status 1 if one
of tilegpt's results is missing or less exact than cuDNN's by more than a fifth.

How it is measured. Every backend reads the same contiguous (B,T,NH,HS) tensors, PyTorch's through
(B,NH,T,HS) views, which its kernels take without a copy. Passes are called directly, without
autograd: through the C interface here, as aten operators there; only naive, which has no operator
of its own, goes through autograd, with its graph kept. All allocate their outputs. A figure is the
median of event timings of groups of calls of a millisecond or more, taken in rounds in which the
backends take turns, each round in another order: whoever comes after one that heats the GPU has a
slower clock. The queue is filled before the timing starts, so that launching does not show. Calls
alternate between two sets of tensors, each several times larger than the L2. TFLOP/s count
4·B·NH·T²·HS forward, half of it if causal, and 2.5 times that backward. Naive is timed less often,
on one set.

Errors are ‖x - reference‖ / ‖reference‖ against float64 on the same bf16 inputs, over one to four
heads of the first set. Memory is the peak of PyTorch's allocator over one forward and backward,
less what the inputs hold.
"""
import argparse
import collections
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "dev" / "results"
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
TOKENS, WIDTH = 16384, 2048
SETS, ROUNDS = 2, 6
ERROR_RATIO = 1.2   # of cuDNN's error, at most
ERROR_ALONE = 1e-2  # where there is no cuDNN: bf16 rounds P, dS and the results to 4e-3 each
PEERS = ["FA2", "cuDNN"]

Cell = collections.namedtuple("Cell", "HS mask T B NH")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", default="auto",
                        help="of tilegpt, by commas; NAME+deterministic asks for equal bits")
    parser.add_argument("--head-size", default="64,128", help="by commas")
    parser.add_argument("--mask", default="causal,full", help="by commas")
    parser.add_argument("--length", default=",".join(map(str, LENGTHS)), help="by commas")
    parser.add_argument("--no-trainer", action="store_true", help="without the trainer's shape")
    parser.add_argument("--no-naive", action="store_true", help="without PyTorch's naive backend")
    parser.add_argument("--quick", action="store_true", help="causal, T = 1024 and 4096 only")
    parser.add_argument("--budget", type=float, default=60, help="ms for each figure")
    parser.add_argument("--output", default=str(RESULTS / "attention.jsonl"))
    parser.add_argument("--picture", default=str(RESULTS / "attention.png"))
    parser.add_argument("--commit", help="to record; default: what git says")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.quick:
        options.mask, options.length, options.budget = "causal", "1024,4096", 24
    return options


def cells(options):
    for HS in map(int, options.head_size.split(",")):
        for mask in options.mask.split(","):
            for T in map(int, options.length.split(",")):
                yield Cell(HS, mask, T, max(1, TOKENS // T), WIDTH // HS)
    if not options.no_trainer:
        yield Cell(64, "causal", 1024, 64, 12)


def cell_name(cell):
    return f"HS={cell.HS} {cell.mask} T={cell.T}"


def forward_operations(cell):
    full = 4 * cell.B * cell.NH * cell.T**2 * cell.HS
    return full / 2 if cell.mask == "causal" else full


# --- the backends ------------------------------------------------------------------------------

class Tensors:
    """One set of inputs: (B,T,NH,HS), and (B,NH,T,HS) views of the same memory."""

    def __init__(self, cell, generator):
        shape = (cell.B, cell.T, cell.NH, cell.HS)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(4))
        self.views = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        self.dout_view = self.dout.transpose(1, 2)


class Tilegpt:
    """forward gives what backward needs; output and gradients are (B,T,NH,HS)."""

    def __init__(self, cell, specification):
        name, _, extra = specification.partition("+")
        if extra not in ("", "deterministic"):
            raise ValueError(f"--family={specification}: only +deterministic can follow a name")
        self.options = dict(causal=cell.mask == "causal", family=name,
                            deterministic=extra == "deterministic")

    def family(self, x):
        return door.choose(x.q, x.k, x.v, **self.options)

    def forward(self, x):
        return door.forward(x.q, x.k, x.v, **self.options)

    def backward(self, x, saved):
        return door.backward(x.dout, x.q, x.k, x.v, *saved, **self.options)

    def output(self, saved):
        return saved[0]

    def gradients(self, result):
        return result


class Peer:
    """A fused backend of PyTorch, by its aten operators, on (B,NH,T,HS) views."""

    def __init__(self, cell):
        self.causal = cell.mask == "causal"

    def output(self, saved):
        return saved[0].transpose(1, 2)

    def gradients(self, result):
        return [x.transpose(1, 2) for x in result]


class FlashAttention2(Peer):
    def forward(self, x):
        return torch.ops.aten._scaled_dot_product_flash_attention(*x.views, 0.0, self.causal, False)

    def backward(self, x, saved):
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset = saved[:8]
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            x.dout_view, *x.views, o, lse, cum_q, cum_k, max_q, max_k, 0.0, self.causal, seed,
            offset)


class Cudnn(Peer):
    def forward(self, x):
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            *x.views, None, True, 0.0, self.causal, False)

    def backward(self, x, saved):
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset = saved[:8]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            x.dout_view, *x.views, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0,
            self.causal)


class Naive(Peer):
    """Saved are the output, with its graph, and the inputs that the graph leads to."""

    def forward(self, x):
        inputs = [view.detach().requires_grad_() for view in x.views]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=self.causal), inputs

    def backward(self, x, saved):
        return torch.autograd.grad(saved[0], saved[1], x.dout_view, retain_graph=True)

    def output(self, saved):
        return saved[0].detach().transpose(1, 2)


def backends(cell, options):
    """Each by the name that the table and the record give it."""
    found = {f"tilegpt:{name}": Tilegpt(cell, name) for name in options.family.split(",")}
    found.update({"FA2": FlashAttention2(cell), "cuDNN": Cudnn(cell)})
    if not options.no_naive:
        found["naive"] = Naive(cell)
    return found


# --- errors and memory -------------------------------------------------------------------------

NAMES = ["o", "dq", "dk", "dv"]


def reference(q, k, v, dout, causal):
    """o, dq, dk, dv of one head in float64, by the definition, a thousand queries at a time."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    T, scale = q.shape[0], q.shape[1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    places = torch.arange(T, device=q.device)
    for first in range(0, T, 1024):
        rows = slice(first, min(first + 1024, T))
        s = (q[rows] @ k.T) * scale
        if causal:
            s.masked_fill_(places[None, :] > places[rows, None], -math.inf)
        p = torch.softmax(s, dim=1)
        o[rows] = p @ v
        delta = (dout[rows] * o[rows]).sum(1, keepdim=True)
        ds = p * (dout[rows] @ v.T - delta) * scale
        dq[rows] = ds @ k
        dk += ds.T @ q[rows]
        dv += p.T @ dout[rows]
    return o, dq, dk, dv


def chosen_heads(cell):
    """(b, h), spread over the batch: four, but fewer where T² is large."""
    count = max(1, min(4, 2**27 // cell.T**2, cell.B * cell.NH))
    last = cell.B * cell.NH - 1
    places = [last * i // max(1, count - 1) for i in range(count)] if count > 1 else [last]
    return [divmod(place, cell.NH) for place in places]


def references(cell, x):
    return {(b, h): reference(x.q[b, :, h], x.k[b, :, h], x.v[b, :, h], x.dout[b, :, h],
                              cell.mask == "causal") for b, h in chosen_heads(cell)}


def errors(found, exact):
    """Of o, dq, dk, dv, (B,T,NH,HS) each: over all chosen heads together."""
    result = {}
    for i, name in enumerate(NAMES):
        difference = sum(float((found[i][b, :, h].double() - truth[i]).square().sum())
                         for (b, h), truth in exact.items())
        norm = sum(float(truth[i].square().sum()) for truth in exact.values())
        result[f"error_{name}"] = math.sqrt(difference / norm)
    return result


def check(backend, x, exact):
    """One forward and backward: errors and peak memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saved = backend.forward(x)
    gradients = backend.backward(x, saved)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    found = [backend.output(saved), *backend.gradients(gradients)]
    return {"peak_bytes": peak, **errors(found, exact)}


# --- time --------------------------------------------------------------------------------------

def timed_group(call, first, count):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(first, first + count):
        call(i)
    end.record()
    return begin, end


class Timer:
    """Collects the milliseconds of call(0), call(1), … in rounds."""

    def __init__(self, call, budget):
        self.call, self.times = call, []
        timed_group(call, 0, SETS)
        begin, end = timed_group(call, 0, SETS)
        torch.cuda.synchronize()
        once = begin.elapsed_time(end) / SETS
        self.group = max(1, math.ceil(1.0 / once))
        self.groups = max(1, min(50, round(budget / ROUNDS / (once * self.group))))

    def round(self):
        # The GPU waits some two milliseconds, in which the host gets ahead of it.
        getattr(torch.cuda, "_sleep", lambda cycles: None)(4_000_000)
        pairs = [timed_group(self.call, i * self.group, self.group) for i in range(self.groups)]
        torch.cuda.synchronize()
        self.times += [begin.elapsed_time(end) / self.group for begin, end in pairs]

    def milliseconds(self):
        return statistics.median(self.times)


def forward_call(backend, sets):
    return lambda i: backend.forward(sets[i % len(sets)])


def backward_call(backend, sets):
    saved = [backend.forward(x) for x in sets]
    return lambda i: backend.backward(sets[i % len(sets)], saved[i % len(sets)])


CALLS = {"forward": forward_call, "backward": backward_call}


def reason(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def forget():
    """Gives freed memory back, for backends that allocate by other ways; after a failure, too."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        pass


def measure(cell, options):
    """{name: figures, or the reason that there are none}."""
    generator = torch.Generator(device="cuda").manual_seed(cell.T)
    sets = [Tensors(cell, generator) for _ in range(SETS)]
    exact = references(cell, sets[0])
    found, timers = {}, {}
    for name, backend in backends(cell, options).items():
        try:
            found[name] = check(backend, sets[0], exact)
            if isinstance(backend, Tilegpt):
                found[name]["family"] = backend.family(sets[0])
            if isinstance(backend, Naive):  # it holds too much to wait for its turns
                for pass_, make in CALLS.items():
                    timer = Timer(make(backend, sets[:1]), options.budget)
                    timer.round()
                    found[name][f"{pass_}_ms"] = timer.milliseconds()
                    del timer
                forget()
            else:
                timers[name] = {pass_: Timer(make(backend, sets), options.budget)
                                for pass_, make in CALLS.items()}
        except Exception as error:  # one backend's failure is its own
            found[name] = {"failed": reason(error)}
            timers.pop(name, None)
            forget()
    order = random.Random(cell.T)
    for pass_ in CALLS:
        for _ in range(ROUNDS):
            for name in order.sample(list(timers), len(timers)):
                try:
                    timers[name][pass_].round()
                except Exception as error:
                    found[name] = {"failed": reason(error)}
                    del timers[name]
                    forget()
    for name, both in timers.items():
        for pass_, timer in both.items():
            found[name][f"{pass_}_ms"] = timer.milliseconds()
    add_ratios(cell, found)
    return found


def add_ratios(cell, found):
    operations = {"forward": forward_operations(cell), "backward": 2.5 * forward_operations(cell)}
    for figures in found.values():
        for pass_, count in operations.items():
            if f"{pass_}_ms" in figures:
                figures[f"{pass_}_tflops"] = count / figures[f"{pass_}_ms"] / 1e9
    for name, figures in found.items():
        if not name.startswith("tilegpt") or "failed" in figures:
            continue
        for pass_ in operations:
            peers = {peer: found[peer][f"{pass_}_ms"] for peer in PEERS
                     if f"{pass_}_ms" in found.get(peer, {})}
            if peers:
                figures[f"{pass_}_ratio"] = min(peers.values()) / figures[f"{pass_}_ms"]
            if "FA2" in peers:
                figures[f"{pass_}_ratio_fa2"] = peers["FA2"] / figures[f"{pass_}_ms"]
        cudnn = found.get("cuDNN", {})
        if "error_o" in cudnn:
            figures["error_ratio"] = max(figures[f"error_{x}"] / cudnn[f"error_{x}"] for x in NAMES)
        naive = found.get("naive", {})
        if "backward_ms" in naive:
            figures["times_naive"] = ((naive["forward_ms"] + naive["backward_ms"])
                                      / (figures["forward_ms"] + figures["backward_ms"]))


# --- the record --------------------------------------------------------------------------------

def first_line(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return (done.stdout.splitlines() or [None])[0]


def environment(commit):
    return {"what": "compare_attention",
            "commit": commit or first_line("git", "-C", str(ROOT), "--no-optional-locks", "describe",
                                 "--always", "--dirty"),
            "device": torch.cuda.get_device_name(),
            "driver": first_line("nvidia-smi", "--query-gpu=driver_version",
                                 "--format=csv,noheader"),
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "type": "bf16"}


def rounded(figures):
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in figures.items()}


def number(figures, name, form):
    return format(figures[name], form) if name in figures else "n/a"


def print_cell(cell, found):
    print(f"\n{cell_name(cell)} B={cell.B} NH={cell.NH}")
    print(f"  {'':32} {'forward':>17} {'backward':>17} {'ratio to the best peer':>23} "
          f"{'memory':>9} {'error of':>9} {'':>9} {'':>9} {'':>9} {'to cuDNN':>9}")
    print(f"  {'':32} {'ms':>9} {'TFLOP/s':>7} {'ms':>9} {'TFLOP/s':>7} {'forward':>13} "
          f"{'backward':>9} {'MiB':>9} {'o':>9} {'dq':>9} {'dk':>9} {'dv':>9} {'at most':>9}")
    for name, figures in found.items():
        if "failed" in figures:
            print(f"  {name:32} n/a: {figures['failed']}")
            continue
        label = f"{name} ({figures['family']})" if name == "tilegpt:auto" else name
        memory = figures["peak_bytes"] / 2**20
        print(f"  {label:32} {number(figures, 'forward_ms', '9.4f'):>9} "
              f"{number(figures, 'forward_tflops', '7.1f'):>7} "
              f"{number(figures, 'backward_ms', '9.4f'):>9} "
              f"{number(figures, 'backward_tflops', '7.1f'):>7} "
              f"{number(figures, 'forward_ratio', '.3f') if 'family' in figures else '':>13} "
              f"{number(figures, 'backward_ratio', '.3f') if 'family' in figures else '':>9} "
              f"{memory:9.1f} " + " ".join(f"{figures['error_' + x]:9.2e}" for x in NAMES)
              + f" {number(figures, 'error_ratio', '.3f') if 'family' in figures else '':>9}")
    sys.stdout.flush()


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def verdict(results):
    """Prints the sums over the cells; false if one of tilegpt's results is missing or not exact."""
    good = True
    names = dict.fromkeys(name for found in results.values() for name in found
                          if name.startswith("tilegpt"))
    for name in names:
        print(f"\n{name}")
        mine = {cell: found[name] for cell, found in results.items()}
        for cell, figures in mine.items():
            if "failed" in figures:
                good = False
                print(f"  missing: {cell_name(cell)}: {figures['failed']}")
                continue
            worst = max(figures[f"error_{x}"] for x in NAMES)
            within = (figures["error_ratio"] <= ERROR_RATIO if "error_ratio" in figures
                      else worst <= ERROR_ALONE)
            if not within:
                good = False
                print(f"  not exact: {cell_name(cell)}: error up to {worst:.2e}, "
                      f"{number(figures, 'error_ratio', '.3f')} of cuDNN's")
        # The trainer's shape is not one of the cells of the means.
        for key, label in [("forward_ratio", "forward, to the best peer"),
                           ("backward_ratio", "backward, to the best peer"),
                           ("forward_ratio_fa2", "forward, to FA2"),
                           ("backward_ratio_fa2", "backward, to FA2")]:
            ratios = {cell: figures[key] for cell, figures in mine.items()
                      if key in figures and cell.NH * cell.HS == WIDTH}
            if ratios:
                worst = min(ratios, key=ratios.get)
                least = sum(ratio >= 1 for ratio in ratios.values())
                print(f"  {label + ':':28} geometric mean {geometric_mean(ratios.values()):.3f}, "
                      f"at least 1 in {least} of {len(ratios)}, least {ratios[worst]:.3f} at "
                      f"{cell_name(worst)}")
        times = [figures["times_naive"] for cell, figures in mine.items()
                 if "times_naive" in figures and cell.T >= 2048]
        if times:
            print(f"  forward and backward, T >= 2048: {min(times):.1f} to {max(times):.1f} times "
                  "as fast as naive")
        of_cudnn = [figures["error_ratio"] for figures in mine.values() if "error_ratio" in figures]
        if of_cudnn:
            print(f"  error: {min(of_cudnn):.3f} to {max(of_cudnn):.3f} of cuDNN's")
    return good


# --- the picture -------------------------------------------------------------------------------

def newest(path):
    """The last line of each cell, on the device of the last line."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    lines = [line for line in lines if line["device"] == lines[-1]["device"]]
    return {(line["HS"], line["mask"], line["T"], line["NH"]): line for line in lines}


def draw(options):
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    lines = [line for line in newest(options.output).values()
             if line["NH"] * line["HS"] == WIDTH]
    if not lines:
        print("no picture: there are no cells but the trainer's")
        return
    columns = sorted({(line["HS"], line["mask"]) for line in lines})
    names = list(dict.fromkeys(name for line in lines for name in line["results"]))
    styles = {"FA2": ("tab:green", "--"), "cuDNN": ("tab:orange", "--"), "naive": ("tab:gray", ":")}
    mine = [name for name in names if name not in styles]
    colors = ["tab:blue", "tab:red", "tab:purple", "tab:brown"]
    styles.update({name: (colors[i % len(colors)], "-") for i, name in enumerate(mine)})
    lengths = sorted({line["T"] for line in lines})
    figure, axes = pyplot.subplots(2, len(columns), squeeze=False, sharey="row",
                                   figsize=(3.6 * len(columns) + 1, 7))
    for row, pass_ in enumerate(("forward", "backward")):
        for column, (HS, mask) in enumerate(columns):
            axis = axes[row][column]
            for name in names:
                points = sorted((line["T"], line["results"][name][f"{pass_}_tflops"])
                                for line in lines if (line["HS"], line["mask"]) == (HS, mask)
                                and f"{pass_}_tflops" in line["results"].get(name, {}))
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=4, label=name,
                              color=styles[name][0], linestyle=styles[name][1])
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{T // 1024}k" if T >= 1024 else T for T in lengths])
            axis.grid(alpha=0.3)
            axis.set_title(f"{pass_}, head size {HS}, {mask}", fontsize=10)
            if row == 1:
                axis.set_xlabel("T")
            if column == 0:
                axis.set_ylabel("TFLOP/s")
        axes[row][0].set_ylim(bottom=0)  # shared by the row, so after all of it
    axes[0][0].legend(fontsize=8)
    last = lines[-1]
    figure.suptitle(f"Attention on {last['device']}, bf16, {TOKENS:,} tokens, {WIDTH} channels; "
                    f"PyTorch {last['torch']}, cuDNN {last['cudnn']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(options.picture, dpi=120)
    print(f"drawn: {options.picture}")


def main():
    global torch, door
    options = arguments()
    if options.draw:
        draw(options)
        return
    try:
        import torch
        import torch.nn.attention
    except ImportError:
        sys.exit("compare_attention needs PyTorch, which is not installed")
    if not torch.cuda.is_available():
        sys.exit("compare_attention needs a GPU, and PyTorch sees none")
    import torch_attention as door
    door.library()
    # Naive as fast as PyTorch has it: in bf16, where its default would compute in float.
    if hasattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp"):
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    start, record = time.monotonic(), environment(options.commit)
    print(f"{record['device']}, driver {record['driver']}, PyTorch {record['torch']}, CUDA "
          f"{record['cuda']}, cuDNN {record['cudnn']}; tilegpt {record['commit']}")
    results = {}
    for cell in cells(options):
        results[cell] = measure(cell, options)
        print_cell(cell, results[cell])
        line = {**record, **cell._asdict(),
                "results": {name: rounded(figures) for name, figures in results[cell].items()}}
        with open(options.output, "a") as file:
            file.write(json.dumps(line) + "\n")
    good = verdict(results)
    print(f"\n{time.monotonic() - start:.0f} s; appended to {options.output}")
    draw(options)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
