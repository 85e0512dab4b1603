"""Compares a tokenizer of this library with Hugging Face's `tokenizers`, id for id.

    make lib && python3 dev/check_tokenizer.py TOKENIZER_DIRECTORY [FILE...]

encodes the files (those that are UTF-8, in parts of some MB) and, always, a text with every code
point and random texts of odd characters, with names of special tokens taken as tokens and as text.
Needs the packages tokenizers and numpy. Ends with status 1 at the first difference.
"""
import argparse
import ctypes
import os
import random
import sys

import numpy
import tokenizers

PART = 4_000_000  # characters

parser = argparse.ArgumentParser()
parser.add_argument("--library", default="build/libtilegpt.so")
parser.add_argument("directory")
parser.add_argument("files", nargs="*")
arguments = parser.parse_args()


class Here:
    """The tokenizer as this library has it."""

    def __init__(self, directory):
        self.library = ctypes.CDLL(os.path.abspath(arguments.library))
        self.library.error_message.restype = ctypes.c_char_p
        self.library.tokenizer_load.restype = ctypes.c_void_p
        self.library.tokenizer_decode.restype = ctypes.POINTER(ctypes.c_char)
        self.free = ctypes.CDLL(None).free
        self.tokenizer = ctypes.c_void_p(self.library.tokenizer_load(directory.encode()))
        if not self.tokenizer:
            sys.exit(self.library.error_message().decode())

    def encode(self, data, special):
        name = "tokenizer_encode_special" if special else "tokenizer_encode"
        function = getattr(self.library, name)
        function.restype = ctypes.POINTER(ctypes.c_int32)
        count = ctypes.c_size_t()
        ids = function(self.tokenizer, data, ctypes.c_size_t(len(data)), ctypes.byref(count))
        if not ids:
            sys.exit(self.library.error_message().decode())
        copy = numpy.ctypeslib.as_array(ids, (count.value + 1,))[:-1].copy()
        self.free(ids)
        return copy

    def decode(self, ids):
        length = ctypes.c_size_t()
        table = {}
        for i in set(ids.tolist()):
            text = self.library.tokenizer_decode(
                self.tokenizer, ctypes.c_int32(i), ctypes.byref(length))
            table[i] = ctypes.string_at(text, length.value)
        return b"".join(table[i] for i in ids.tolist())


def there(directory):
    path = os.path.join(directory, "tokenizer.json")
    if os.path.exists(path):
        return tokenizers.Tokenizer.from_file(path)
    names = [os.path.join(directory, name) for name in ("vocab.json", "merges.txt")]
    tokenizer = tokenizers.ByteLevelBPETokenizer(*names)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer._tokenizer


def parts():
    """Pairs of a name and a text."""
    yield "an empty text", ""
    codes = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for before, after in (("", ""), ("a", ""), (" ", ""), ("1", "!"), ("\n", " "), ("'", "s")):
        yield "every code point between %r and %r" % (before, after), "".join(
            before + code + after for code in codes)
    odd = list(" \t\n\r\v\f'abst0!\"\\\0\x7f\x85\xa0\xad\xbd\xe9\xdf\u0301\u0623"
               "\u0651\u0663\u200b\u200d\u2003\u2028\u2167\u3000\u4e2d\u6587\ufeff\ufffd"
               "\U0001f642\U0001f469\U000e0001\U0010ffff")
    odd += ["'s", "'ll", "'re", "'T", "  ", "   ", "\r\n", "<|endoftext|>", "<|endof", "the", " a"]
    for seed in range(20):
        draw = random.Random(seed)
        yield "random text %d" % seed, "".join(draw.choices(odd, k=100_000))
    for file in arguments.files:
        with open(file, "rb") as opened:
            data = opened.read()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            print("%s is not UTF-8: left out" % file)
            continue
        for start in range(0, len(text), PART):
            yield "%s from character %d" % (file, start), text[start:start + PART]


def main():
    here, library = Here(arguments.directory), there(arguments.directory)
    total = 0
    for name, text in parts():
        data = text.encode()
        total += len(data)
        for special in (True, False):
            library.encode_special_tokens = not special
            expected = library.encode(text, add_special_tokens=False).ids
            expected = numpy.array(expected, dtype=numpy.int32)
            ids = here.encode(data, special)
            if not numpy.array_equal(ids, expected):
                n = min(len(ids), len(expected))
                differ = numpy.flatnonzero(ids[:n] != expected[:n])
                at = int(differ[0]) if len(differ) else n
                sys.exit("%s, special=%s: id %d is %s here and %s there, after %r" % (
                    name, special, at, ids[at:at + 5], expected[at:at + 5],
                    here.decode(ids[max(0, at - 5):at])))
            prefix = getattr(library.pre_tokenizer, "add_prefix_space", False)
            if not prefix and here.decode(ids) != data:
                sys.exit("%s, special=%s: decoding gives another text" % (name, special))
    print("%.1f MB are encoded alike" % (total / 1e6))


main()
