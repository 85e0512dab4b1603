#!/usr/bin/env python3
"""tilegpt's attention for PyTorch, through the C interface of attention/attention.h.

    make lib
    from torch_attention import attention               # with dev/ on the path
    o = attention(q, k, v, causal=True)                 # q (B,TQ,NH,HS), k and v (B,TK,NKV,HS)

Nothing is copied: tensors are read and written in place through their strides, so slices of a
packed (B,T,3,NH,HS) tensor and transposed (B,NH,T,HS) tensors are as good as contiguous ones, as
long as the HS elements of a head are neighbours. Work goes to PyTorch's current stream, workspaces
come from its allocator.

The library is build/libtilegpt.so, or what TILEGPT_LIBRARY names. Loading it starts neither MPI nor
a GPU. Without PyTorch this file can still be imported, for the structures; it prints them with

    python3 dev/torch_attention.py --layout            # test/test_torch_door.sh compares them with C
"""
import ctypes
import os
import pathlib
import sys
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p

try:
    import torch
except ImportError:
    torch = None

# --- the C interface ---------------------------------------------------------------------------

DEVICE_CPU, DEVICE_CUDA = 0, 1
TYPE_F32, TYPE_F64, TYPE_BF16 = 0, 1, 2
ATTENTION_FULL, ATTENTION_CAUSAL = 0, 1
WORKSPACE_ALIGNMENT = 256


class Dropout(ctypes.Structure):
    _fields_ = [("probability", c_float), ("key", c_uint64)]


class Attention(ctypes.Structure):
    _fields_ = [("device", c_int), ("type", c_int), ("B", c_size_t), ("NH", c_size_t),
                ("NKV", c_size_t), ("TQ", c_size_t), ("TK", c_size_t), ("HS", c_size_t),
                ("mask", c_int), ("scale", c_float), ("dropout", Dropout),
                ("deterministic", c_int), ("family", c_int)]


class AttentionView(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("batch", c_size_t), ("token", c_size_t), ("head", c_size_t)]


class AttentionTensors(ctypes.Structure):
    _fields_ = [("q", AttentionView), ("k", AttentionView), ("v", AttentionView),
                ("o", AttentionView), ("lse", c_void_p)]


class AttentionGradients(ctypes.Structure):
    _fields_ = [("dout", AttentionView), ("dq", AttentionView), ("dk", AttentionView),
                ("dv", AttentionView)]


STRUCTURES = [Dropout, Attention, AttentionView, AttentionTensors, AttentionGradients]
CONSTANTS = ["DEVICE_CPU", "DEVICE_CUDA", "TYPE_F32", "TYPE_F64", "TYPE_BF16", "ATTENTION_FULL",
             "ATTENTION_CAUSAL"]


def layout():
    """One line for each structure (size), field (offset, size) and constant (value)."""
    for structure in STRUCTURES:
        yield f"{structure.__name__} {ctypes.sizeof(structure)}"
        for field, _ in structure._fields_:
            place = getattr(structure, field)
            yield f"{structure.__name__}.{field} {place.offset} {place.size}"
    for constant in CONSTANTS:
        yield f"{constant} {globals()[constant]}"


_library = None


def library():
    """The loaded library, with the types of its functions declared."""
    global _library
    if _library is not None:
        return _library
    built = pathlib.Path(__file__).resolve().parent.parent / "build" / "libtilegpt.so"
    path = os.environ.get("TILEGPT_LIBRARY") or str(built)
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); `make lib` builds it, "
                           "TILEGPT_LIBRARY names another") from None
    pointer = ctypes.POINTER
    problem, tensors = pointer(Attention), pointer(AttentionTensors)
    for name, result, arguments in [
            ("attention_forward", c_char_p, [problem, tensors, c_void_p, c_void_p]),
            ("attention_backward", c_char_p,
             [problem, tensors, pointer(AttentionGradients), c_void_p, c_void_p]),
            ("attention_forward_workspace", c_size_t, [problem]),
            ("attention_backward_workspace", c_size_t, [problem]),
            ("attention_choose", c_int, [problem]),
            ("attention_name", c_char_p, [c_int]),
            ("attention_by_name", c_int, [c_char_p]),
            ("error_message", c_char_p, [])]:
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    _library = loaded
    return _library


def family_number(name):
    """The AttentionFamily of that name, asked of the library: families come and go."""
    number = library().attention_by_name(name.encode())
    if library().attention_name(number) != name.encode():
        raise ValueError(f"attention: there is no family {name!r}")
    return number


def check(sentence):
    """Raises what attention_forward or attention_backward complains of, if anything."""
    if sentence is not None:
        raise ValueError(sentence.decode())


# --- PyTorch -----------------------------------------------------------------------------------

if torch is not None:
    _TYPES = {torch.float32: TYPE_F32, torch.float64: TYPE_F64, torch.bfloat16: TYPE_BF16}
    _ACCUMULATORS = {torch.float32: torch.float32, torch.float64: torch.float64,
                     torch.bfloat16: torch.float32}


def _problem(q, k, v, causal, scale, dropout, seed, family, deterministic):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"attention: {name} has {x.dim()} dimensions; it is (B,T,NH,HS)")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"attention: q is {q.dtype} on {q.device}, but {name} is {x.dtype} on "
                             f"{x.device}; they must agree")
    if q.dtype not in _TYPES or q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"attention: {q.dtype} on {q.device} is not supported; use float32, "
                         "bfloat16 (CUDA) or float64 (CPU)")
    B, TQ, NH, HS = q.shape
    _, TK, NKV, _ = k.shape
    if k.shape != (B, TK, NKV, HS) or v.shape != k.shape:
        raise ValueError(f"attention: q is {tuple(q.shape)}, k {tuple(k.shape)}, v "
                         f"{tuple(v.shape)}; expected (B,TQ,NH,HS), (B,TK,NKV,HS), (B,TK,NKV,HS)")
    return Attention(
        device=DEVICE_CUDA if q.is_cuda else DEVICE_CPU, type=_TYPES[q.dtype], B=B, NH=NH, NKV=NKV,
        TQ=TQ, TK=TK, HS=HS, mask=ATTENTION_CAUSAL if causal else ATTENTION_FULL,
        scale=0.0 if scale is None else scale, dropout=Dropout(dropout, seed % 2**64),
        deterministic=int(deterministic), family=family_number(family))


def _view(name, x):
    if x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"attention: the elements of a head must be neighbours, but those of "
                         f"{name} are {x.stride(3)} apart; use .contiguous()")
    return AttentionView(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def _workspace(bytes_, device):
    """The memory, which must outlive the call, and its first aligned address."""
    if bytes_ == 0:
        return None, None
    memory = torch.empty(bytes_ + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=device)
    return memory, -(-memory.data_ptr() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


def _run(function, problem, workspace_bytes, device, *structures):
    pointers = [ctypes.byref(structure) for structure in structures]
    memory, workspace = _workspace(workspace_bytes, device)
    if device.type == "cpu":
        check(function(ctypes.byref(problem), *pointers, workspace, None))
        return
    # The memory returns to the allocator at once, which gives it to later work of this stream only.
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        check(function(ctypes.byref(problem), *pointers, workspace, stream))
    del memory


def choose(q, k, v, causal=False, scale=None, dropout=0.0, seed=0, family="auto",
           deterministic=False):
    """The name of the family that will run."""
    problem = _problem(q, k, v, causal, scale, dropout, seed, family, deterministic)
    name = library().attention_name(library().attention_choose(ctypes.byref(problem))).decode()
    if name == "auto":
        raise ValueError(library().error_message().decode())
    return name


def forward(q, k, v, causal=False, scale=None, dropout=0.0, seed=0, family="auto",
            deterministic=False):
    """o (B,TQ,NH,HS) and lse (B,NH,TQ), without autograd."""
    problem = _problem(q, k, v, causal, scale, dropout, seed, family, deterministic)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((problem.B, problem.NH, problem.TQ), dtype=_ACCUMULATORS[q.dtype],
                      device=q.device)
    tensors = AttentionTensors(_view("q", q), _view("k", k), _view("v", v), _view("o", o),
                               lse.data_ptr())
    _run(library().attention_forward, problem,
         library().attention_forward_workspace(ctypes.byref(problem)), q.device, tensors)
    return o, lse


def backward(dout, q, k, v, o, lse, causal=False, scale=None, dropout=0.0, seed=0, family="auto",
             deterministic=False):
    """dq, dk, dv in the shapes of q, k, v. The options are those that the forward was given."""
    problem = _problem(q, k, v, causal, scale, dropout, seed, family, deterministic)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = AttentionTensors(_view("q", q), _view("k", k), _view("v", v), _view("o", o),
                               lse.data_ptr())
    gradients = AttentionGradients(_view("dout", dout), _view("dq", dq), _view("dk", dk),
                                   _view("dv", dv))
    _run(library().attention_backward, problem,
         library().attention_backward_workspace(ctypes.byref(problem)), q.device, tensors,
         gradients)
    return dq, dk, dv


if torch is not None:

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            o, lse = forward(q, k, v, **options)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.options = options
            return o

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dout):
            q, k, v, o, lse = ctx.saved_tensors
            # What sum() and mean() hand back is one number expanded, all of its strides 0.
            if dout.stride(3) != 1 or dout.stride(1) < dout.shape[3]:
                dout = dout.contiguous()
            return *backward(dout, q, k, v, o, lse, **ctx.options), None


def attention(q, k, v, causal=False, scale=None, dropout=0.0, seed=0, family="auto",
              deterministic=False):
    """dropout(softmax(scale · q kᵀ + mask)) v, differentiable in q, k and v.

    q is (B,TQ,NH,HS), k and v are (B,TK,NKV,HS), where NKV divides NH; the result is (B,TQ,NH,HS).
    float32 and bfloat16 on CUDA, float32 and float64 on the CPU. causal is aligned at the bottom
    right; scale None is 1/sqrt(HS); the dropout mask is a function of seed alone; family is a name
    of attention/attention.h; deterministic asks for equal bits in the backward too.
    """
    if torch is None:
        raise RuntimeError("attention() needs PyTorch, which is not installed")
    options = dict(causal=causal, scale=scale, dropout=dropout, seed=seed, family=family,
                   deterministic=deterministic)
    return _Function.apply(q, k, v, options)


if __name__ == "__main__":
    if sys.argv[1:] != ["--layout"]:
        sys.exit(__doc__)
    print("\n".join(layout()))
