"""Writes tokenizer.json and cases.json beside it, by the package tokenizers (0.23.3).

    python3 test/oracle/bpe/make.py tinyshakespeare.txt

A vocabulary of 512 learned from the text, texts with their ids, and the text's own.
"""
import hashlib
import json
import os
import random
import struct
import sys

from tokenizers import AddedToken, ByteLevelBPETokenizer

here = os.path.dirname(os.path.abspath(__file__))
tokenizer = ByteLevelBPETokenizer()
tokenizer.train([sys.argv[1]], vocab_size=512, show_progress=False,
                special_tokens=["<|endoftext|>"])
tokenizer.add_tokens([AddedToken("gentle sir", normalized=True)])
tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("gent", "gen")])
tokenizer.save(os.path.join(here, "tokenizer.json"), pretty=False)

texts = [
    "", " ", "hello", "O, gentle sir, my gentle  sir!", "gentgentle sirgentle", "a<|endoftext|>b",
    " <|endoftext|> <|endoftext|>", "<|endoftext|>gent", "<|endoftex", "I'll say it's DON'T 'S ''s",
    "   leading", "trailing   ", "a  b   c\n\n d\r\n\t e", "3.14 and \u0663\u00bd \u2167",
    "x\u0000y", "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f467",
    "\u00a0nbsp\u2003em\u3000 x\u0085y\u180ez\u200bw", "\u1c89\U000323af \U0001fae8",
]
odd = list(" \t\n\r'abst01!\"\\\0\x7f\x85\xa0\xbd\xe9\u0301\u0623\u200d\u2028\u3000\u4e2d")
odd += ["\U0001f642"]
odd += ["'s", "'ll", "  ", "<|endoftext|>", "gent", "gen", "gentle sir", "the", " and", "the king"]
draw = random.Random(1)
texts += ["".join(draw.choices(odd, k=30)) for _ in range(100)]

cases = []
for text in texts:
    case = {"text": text}
    for name, as_text in (("special", False), ("plain", True)):
        tokenizer._tokenizer.encode_special_tokens = as_text
        case[name] = tokenizer.encode(text).ids
    cases.append(case)
with open(sys.argv[1], encoding="utf-8") as file:
    ids = tokenizer.encode(file.read()).ids
sha256 = hashlib.sha256(struct.pack("<%dH" % len(ids), *ids)).hexdigest()
whole = {"n": len(ids), "sha256_uint16": sha256}
with open(os.path.join(here, "cases.json"), "w") as file:
    json.dump({"cases": cases, "tinyshakespeare": {"whole": whole}}, file)
    file.write("\n")
