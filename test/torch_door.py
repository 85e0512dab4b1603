"""Checks of dev/torch_attention.py, named on the command line; each prints what is wrong.

    python3 test/torch_door.py forward|gradients|refusals|torch LIBRARY
"""
import ctypes
import importlib.util
import math
import os
import pathlib
import random
import sys

os.environ["TILEGPT_LIBRARY"] = sys.argv[2]
sys.dont_write_bytecode = True
source = pathlib.Path(__file__).resolve().parent.parent / "dev" / "torch_attention.py"
spec = importlib.util.spec_from_file_location("torch_attention", source)
door = importlib.util.module_from_spec(spec)
spec.loader.exec_module(door)

# Two query heads share one key head, there are more keys than queries, the mask is causal: each size
# has a value of its own. The scale is exact in float, as which it is passed.
B, NH, NKV, TQ, TK, HS, SCALE = 2, 2, 1, 3, 5, 4, 0.75


class Tensor:
    """Doubles in (B,heads,T,HS) memory, which the views reorder by their strides."""

    def __init__(self, heads, T, fill=None):
        self.heads, self.T = heads, T
        n = B * heads * T * HS
        self.data = (ctypes.c_double * n)(*([fill() for _ in range(n)] if fill else []))

    def view(self):
        return door.AttentionView(ctypes.addressof(self.data), self.heads * self.T * HS, HS,
                                  self.T * HS)

    def row(self, b, h, t):
        first = ((b * self.heads + h) * self.T + t) * HS
        return self.data[first:first + HS]


def problem(**changes):
    fields = dict(device=door.DEVICE_CPU, type=door.TYPE_F64, B=B, NH=NH, NKV=NKV, TQ=TQ, TK=TK,
                  HS=HS, mask=door.ATTENTION_CAUSAL, scale=SCALE, dropout=door.Dropout(0.0, 0),
                  deterministic=1, family=door.family_number("flash_v1"))
    return door.Attention(**{**fields, **changes})


class Case:
    def __init__(self):
        values = random.Random(1)
        normal = lambda: values.gauss(0, 1)
        self.q, self.dout = Tensor(NH, TQ, normal), Tensor(NH, TQ, normal)
        self.k, self.v = Tensor(NKV, TK, normal), Tensor(NKV, TK, normal)
        self.o, self.dq = Tensor(NH, TQ), Tensor(NH, TQ)
        self.dk, self.dv = Tensor(NKV, TK), Tensor(NKV, TK)
        self.lse = (ctypes.c_double * (B * NH * TQ))()

    def tensors(self):
        return door.AttentionTensors(self.q.view(), self.k.view(), self.v.view(), self.o.view(),
                                     ctypes.addressof(self.lse))

    def run(self, function, workspace_bytes, p, *structures):
        memory = ctypes.create_string_buffer(workspace_bytes(ctypes.byref(p)) + 256)
        aligned = -(-ctypes.addressof(memory) // 256) * 256
        door.check(function(ctypes.byref(p), *map(ctypes.byref, structures), aligned, None))

    def forward(self, **changes):
        library = door.library()
        self.run(library.attention_forward, library.attention_forward_workspace,
                 problem(**changes), self.tensors())
        return sum(x * y for x, y in zip(self.o.data, self.dout.data))

    def backward(self, **changes):
        library = door.library()
        gradients = door.AttentionGradients(self.dout.view(), self.dq.view(), self.dk.view(),
                                            self.dv.view())
        self.run(library.attention_backward, library.attention_backward_workspace,
                 problem(**changes), self.tensors(), gradients)


def near(name, found, expected, tolerance):
    if not abs(found - expected) <= tolerance:
        print(f"{name} is {found}, expected {expected}")


def check_forward():
    """Against the definition, in doubles: sums of a few terms, each rounded to 1e-16."""
    case = Case()
    case.forward()
    for b in range(B):
        for h in range(NH):
            for i in range(TQ):
                q = case.q.row(b, h, i)
                seen = range(i + 1 + TK - TQ)
                s = [SCALE * sum(x * y for x, y in zip(q, case.k.row(b, 0, j))) for j in seen]
                lse = math.log(sum(map(math.exp, s)))
                near("lse", case.lse[(b * NH + h) * TQ + i], lse, 1e-14)
                for c in range(HS):
                    o = sum(math.exp(s[j] - lse) * case.v.row(b, 0, j)[c] for j in seen)
                    near("o", case.o.row(b, h, i)[c], o, 1e-14)
    without = list(case.o.data)
    case.forward(dropout=door.Dropout(0.5, 12345))
    if list(case.o.data) == without:
        print("dropout changes nothing")


def check_gradients():
    """Against central differences in doubles, whose error is about h² + 1e-16/h."""
    case, h = Case(), 1e-5
    dropout = door.Dropout(0.25, 7)
    case.forward(dropout=dropout)
    case.backward(dropout=dropout)
    for name, x, dx in (("dq", case.q, case.dq), ("dk", case.k, case.dk), ("dv", case.v, case.dv)):
        found = list(dx.data)
        for i in range(0, len(found), 3):
            kept, sides = x.data[i], []
            for step in (h, -h):
                x.data[i] = kept + step
                sides.append(case.forward(dropout=dropout))
            x.data[i] = kept
            near(f"{name}[{i}]", found[i], (sides[0] - sides[1]) / (2 * h), 1e-8)


def check_refusals():
    """The library's sentences arrive; nothing else does."""
    case = Case()
    for change, word in (({"HS": 300}, "at most 256"), ({"NKV": 3}, "does not divide"),
                         ({"device": 7}, "neither DEVICE_CPU nor"), ({"mask": 5}, "mask 5"),
                         ({"scale": -1.0}, "scale"), ({"dropout": door.Dropout(1.5, 0)}, "dropout"),
                         ({"family": 99}, "no family 99"), ({"type": door.TYPE_BF16}, "bf16")):
        try:
            case.forward(**change)
            print(f"{change} was accepted")
        except ValueError as error:
            if word not in str(error):
                print(f"{change}: {error}")
    try:
        door.family_number("flash")
        print("a family called flash was found")
    except ValueError:
        pass


def check_torch():
    """Autograd against PyTorch's own, on every device, through views of one packed tensor."""
    import torch
    import torch.nn.attention
    torch.manual_seed(1)
    cases = [("cpu", torch.float32, 1e-5)]  # fp32: sums of some hundred terms
    if torch.cuda.is_available():
        # CUDA's exponentials are approximate to a few ulp. bf16 rounds o, P and dS to 4e-3, where
        # PyTorch's result, here in fp32, is not rounded.
        cases += [("cuda", torch.float32, 1e-4), ("cuda", torch.bfloat16, 1e-2)]
    for device, dtype, tolerance in cases:
        for causal in (False, True):
            packed = torch.randn(2, 130, 3, 4, 64, device=device).to(dtype).requires_grad_()
            dout = torch.randn(2, 130, 4, 64, device=device).to(dtype)
            o = door.attention(*packed.unbind(2), causal=causal)
            (gradient,) = torch.autograd.grad(o, packed, dout)
            exact = packed.detach().float().requires_grad_()
            q, k, v = (x.transpose(1, 2) for x in exact.unbind(2))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                expected = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal).transpose(1, 2)
            (expected_gradient,) = torch.autograd.grad(expected, exact, dout.float())
            for name, x, y in (("o", o, expected), ("gradient", gradient, expected_gradient)):
                error = float((x.detach().float() - y.detach()).norm() / y.detach().norm())
                if not error <= tolerance:
                    print(f"{name} on {device} in {dtype}, causal={causal}: error {error}")
            # A gradient that is one number expanded; and a view without neighbours.
            door.attention(*packed.unbind(2), causal=causal).sum().backward()
    x = torch.randn(1, 8, 2, 16)
    try:
        door.attention(x.transpose(2, 3), x.transpose(2, 3), x.transpose(2, 3))
        print("heads without neighbours were accepted")
    except ValueError as error:
        if "neighbours" not in str(error):
            print(error)


globals()["check_" + sys.argv[1]]()
