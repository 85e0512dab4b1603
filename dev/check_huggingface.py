"""Models between transformers and this program, both ways, held against transformers' own numbers.

    python3 dev/check_huggingface.py [--build=build] [--size=gpt2-124M|tiny] [--device=cpu|cuda]

Makes randomly initialised GPT-2s with transformers, saves them in every form that is read here, and
for each compares the logits of build/check_gpt with those of the same parameters in float64; then
what build/train_gpt writes (exports, llm.c's files and back, a checkpoint after training at a
learning rate of 0) with what it was given, the loss of `eval`, and the text of `sample`. Prints one
line for each; exits with 1 if any is off, with 2 if it could not be run. Needs torch, transformers
and 10 GiB in TMPDIR for the size of 124M.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import numpy
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging
except ImportError as missing:
    print(f"check_huggingface: {missing}; pip install torch transformers")
    sys.exit(2)

V, SHARD_MAGIC, PROMPT, SAMPLED = 50257, 20240520, "The quick brown fox", 24
SIZES = {"gpt2-124M": {}, "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 128}}
# Sums of a few hundred fp32 values in another order; on CUDA exponentials are approximate besides.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


class Checks:
    """Counts failures; every comparison is one line."""

    def __init__(self):
        self.failures = 0

    def line(self, name, good, figure):
        print(f"{name:<52} {figure}{'' if good else '  FAILED'}", flush=True)
        self.failures += not good

    def error(self, name, error, tolerance):
        self.line(name, error <= tolerance, f"{error:.3e}  (tolerance {tolerance:.0e})")


class Program:
    """The programs under test."""

    def __init__(self, build, device):
        self.build, self.device = pathlib.Path(build).resolve(), device
        for name in ("train_gpt", "check_gpt"):
            if not (self.build / name).exists():
                print(f"check_huggingface: there is no {self.build / name}; make all, or --build=…")
                sys.exit(2)

    def run(self, name, *arguments):
        """The output, or None after printing what the program said."""
        command = [str(self.build / name), *map(str, arguments)]
        result = subprocess.run(command, capture_output=True)
        if result.returncode == 0:
            return result.stdout
        print(" ".join(command), result.stdout.decode(errors="replace"),
              result.stderr.decode(errors="replace"), f"status {result.returncode}", sep="\n")
        return None

    def train_gpt(self, *arguments):
        return self.run("train_gpt", *arguments)


def relative_error(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()


@torch.no_grad()
def logits_of(directory, ids):
    """transformers' logits of the parameters as they are stored, computed in float64."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).double().eval()
    return model(ids).logits


def make_models(work, shape):
    """The forms in which a model may come: name -> directory."""
    config = GPT2Config(vocab_size=V, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                        bos_token_id=V - 1, eos_token_id=V - 1, **shape)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and layernorms start as 0 and 1, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    size = sum(p.numel() for p in model.parameters()) * 4
    forms = {}

    def save(name, what, **options):
        forms[name] = work / name
        what.save_pretrained(forms[name], **options)

    save("fp32", model)
    save("sharded", model, max_shard_size=f"{size // 5 >> 10}KB")
    save("bare", model.transformer)
    for dtype in ("bfloat16", "float16"):
        save(dtype, GPT2LMHeadModel.from_pretrained(forms["fp32"], dtype=getattr(torch, dtype)))
    # With the head spelt out beside the token embedding, as older files have it.
    forms["explicit"] = work / "explicit"
    shutil.copytree(forms["bare"], forms["explicit"])
    tensors = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    save_file(tensors, forms["explicit"] / "model.safetensors", metadata={"format": "pt"})
    config.tie_word_embeddings = False
    save("untied", GPT2LMHeadModel(config))
    return forms


def make_tokenizer(directory):
    """A byte-level BPE of GPT-2's size: the bytes, the first pairs of them, and the end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    order = printable + others
    pairs = [(a, b) for a in order for b in order][:V - 257]
    words = [letters[b] for b in order] + [letters[a] + letters[b] for a, b in pairs]
    words.append("<|endoftext|>")
    (directory / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (directory / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{letters[a]} {letters[b]}\n" for a, b in pairs))
    return {i: bytes([b]) for i, b in enumerate(order)} | {
        i + 256: bytes(pair) for i, pair in enumerate(pairs)} | {V - 1: b"<|endoftext|>"}


def write_shard(path, ids):
    header = numpy.zeros(256, dtype="<i4")
    header[:3] = SHARD_MAGIC, 1, len(ids)
    path.write_bytes(header.tobytes() + numpy.asarray(ids, dtype="<u2").tobytes())


def check_import(checks, program, name, directory, ids, reference):
    save_file({"step0.tokens": ids, "step0.logits": reference.float().contiguous()},
              directory / "expected.safetensors")
    output = program.run("check_gpt", directory, "--only=logits", f"--device={program.device}")
    (directory / "expected.safetensors").unlink()
    error = float(output.split()[1]) if output else float("nan")
    checks.error(f"{name}: logits here", error, TOLERANCE[program.device])


def check_same(checks, name, directory, ids, reference):
    """Parameters that were copied bit by bit give the same float64 logits, but for threads' sums.
    One of them rounded to fp32 once more would show at 1e-10."""
    checks.error(name, relative_error(logits_of(directory, ids), reference), 1e-12)


def export(checks, program, name, directory, target, precision, ids, reference):
    """Exports to the target; from a file of llm.c, which transformers does not read, once more."""
    done = program.train_gpt("export", f"--checkpoint={directory}", f"--output={target}",
                             f"--precision={precision}")
    if done is None:
        checks.line(name, False, "refused")
    elif target.suffix == ".bin":
        export(checks, program, name, target, target.with_suffix(""), precision, ids, reference)
        target.unlink()
    else:
        check_same(checks, name, target, ids, reference)
        shutil.rmtree(target)


def check_conversions(checks, program, work, directory, ids, reference):
    """Exports of fewer bits, and llm.c's files on the way."""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with torch.no_grad():
            rounded = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).double()
            expected = rounded(ids).logits
        export(checks, program, f"{precision}: logits of the export", directory, work / "export",
               precision, ids, expected)
        if precision == "bf16":
            export(checks, program, "bf16: logits through llm.c", directory, work / "model.bin",
                   precision, ids, expected)
    export(checks, program, "fp32: logits through llm.c", directory, work / "model.bin", "fp32",
           ids, reference)


def check_training(checks, program, work, name, directory, ids, reference):
    """A step at a learning rate of 0 changes no bit; the loss of eval is transformers'."""
    shard, run = work / "shard.bin", work / "run"
    write_shard(shard, ids.flatten().tolist())
    T = ids.shape[1]
    output = program.train_gpt("eval", f"--checkpoint={directory}", f"--data={shard}",
                               f"--sequence={T}", "--batch=1", f"--device={program.device}",
                               "--precision=fp32", f"--eval-tokens={T - 1}")
    expected = torch.nn.functional.cross_entropy(reference[0, :-1], ids[0, 1:])
    loss = float(output.split()[1]) if output else float("nan")
    checks.error(f"{name}: loss of eval", abs(loss - expected.item()) / expected.item(), 1e-5)
    arguments = (f"--init={directory}", f"--data={shard}", f"--run={run}", "--lr=0", "--min-lr=0",
                 "--steps=1", "--batch=1", "--eval-every=0", f"--sequence={T // 2}",
                 f"--device={program.device}")
    if program.train_gpt("train", *arguments) is None:
        return checks.line(f"{name}: training", False, "refused")
    check_same(checks, f"{name}: logits after training at lr 0", run / "last", ids, reference)
    shutil.rmtree(run)


@torch.no_grad()
def check_greedy(checks, program, directory, words):
    """The likeliest tokens one after the other, as far as rounding cannot choose another."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).double().eval()
    tokenizer = Tokenizer(BPE.from_file(str(directory / "vocab.json"),
                                        str(directory / "merges.txt")))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    ids, expected = tokenizer.encode(PROMPT).ids, PROMPT.encode()
    for _ in range(SAMPLED):
        logits = model(torch.tensor([ids])).logits[0, -1]
        top = logits.topk(2).values
        if (top[0] - top[1]).item() < 1e-3:
            break
        ids.append(int(logits.argmax()))
        if ids[-1] == V - 1:
            break
        expected += words[ids[-1]]
    output = program.train_gpt("sample", f"--checkpoint={directory}", f"--prompt={PROMPT}",
                               "--temperature=0", f"--tokens={SAMPLED}", "--precision=fp32",
                               f"--device={program.device}")
    good = output is not None and output.startswith(expected) and len(expected) > len(PROMPT)
    checks.line("greedy continuation", good, f"{len(expected) - len(PROMPT)} bytes")
    if not good and output is not None:
        print(f"  expected {expected!r}\n  found    {output!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--size", choices=SIZES, default="gpt2-124M")
    parser.add_argument("--device", choices=TOLERANCE, default="cpu")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    checks, program = Checks(), Program(options.build, options.device)
    with tempfile.TemporaryDirectory(prefix="check_huggingface.") as scratch:
        work = pathlib.Path(scratch)
        forms = make_models(work, SIZES[options.size])
        words = make_tokenizer(forms["fp32"])
        ids = torch.randint(V, (2, 64))
        for name, directory in forms.items():
            reference = logits_of(directory, ids)
            check_import(checks, program, name, directory, ids, reference)
            export(checks, program, f"{name}: logits of the export", directory, work / "export",
                   "fp32", ids, reference)
            if name in ("fp32", "untied"):
                check_training(checks, program, work, name, directory, ids, reference)
            if name == "fp32":
                check_conversions(checks, program, work, directory, ids, reference)
                check_greedy(checks, program, directory, words)
            shutil.rmtree(directory)
    print(f"{checks.failures} failed" if checks.failures else "all as in transformers")
    return checks.failures > 0


if __name__ == "__main__":
    sys.exit(main())
