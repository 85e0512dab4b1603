"""Writes data/unicode_ranges.inc, the letters and numbers of Unicode 16.0.0.

    python3 dev/unicode.py > data/unicode_ranges.inc

Python 3.14's unicodedata has that version; so has the package unicodedata2, version 16.0.0.
"""
try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "16.0.0"
CATEGORIES = (("LETTER", "L"), ("NUMBER", "N"))


def ranges(category):
    first = None
    for code in range(0x110000 + 1):
        inside = code < 0x110000 and unicodedata.category(chr(code))[0] == category
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            yield "{0x%X, 0x%X}," % (first, code - 1)
            first = None


def lines(words, width, indent):
    line = indent
    for word in words:
        if len(line) + 1 + len(word) > width:
            yield line
            line = indent
        line += word if line == indent else " " + word
    yield line


if unicodedata.unidata_version != VERSION:
    raise SystemExit("Unicode %s is needed, not %s" % (VERSION, unicodedata.unidata_version))
print("/* Written by dev/unicode.py: the first and last code points of the runs of letters")
print(" * (category L) and of numbers (N) of Unicode %s. Part of data/unicode.c. */" % VERSION)
for name, category in CATEGORIES:
    print("static const uint32_t %s_ranges[][2] = {" % name.lower())
    print("\n".join(lines(ranges(category), 100, " " * 4)))
    print("};")
