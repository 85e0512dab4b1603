#!/bin/sh
# dev/torch_attention.py against the shared library: the structures it mirrors, and calls through
# them, without PyTorch and, where it is installed, with it.
. test/lib.sh

# The lines of `torch_attention.py --layout`, by the C compiler. The structures and fields are taken
# from the Python file, so that one that was forgotten there is missing from its size.
layout_in_c() {
    {
        printf '#include <stddef.h>\n#include <stdio.h>\n#include "attention/attention.h"\n'
        printf '#define BYTES(type) printf("%%s %%zu\\n", #type, sizeof(type))\n'
        printf '#define FIELD(type, field) printf("%%s.%%s %%zu %%zu\\n", #type, #field, offsetof(type, field), sizeof(((type *)0)->field))\n'
        printf '#define VALUE(constant) printf("%%s %%d\\n", #constant, (int)constant)\n'
        printf 'int main(void) {\n'
        awk '$1 ~ /\./ { sub(/\./, ", ", $1); print "    FIELD(" $1 ");"; next }
             $1 ~ /^[A-Z0-9_]+$/ { print "    VALUE(" $1 ");"; next }
             { print "    BYTES(" $1 ");" }' layout_python
        printf '}\n'
    } >layout.c
    ${CC:-cc} -std=c11 -I"$root" layout.c -o layout_c && ./layout_c
}

structures_are_those_of_c() {
    python3 "$root/dev/torch_attention.py" --layout >layout_python
    layout_in_c >layout
    diff layout_python layout
    [ "$(grep -c . layout)" -gt 30 ] || echo 'there is too little to compare'
}

through_the_door() { $limited python3 "$root/test/torch_door.py" "$1" "$build/libtilegpt.so"; }

if ! command -v python3 >/dev/null; then
    skip torch_door 'there is no python3'
    finish
fi
check structures_are_those_of_c
if [ "${config:-release}" = sanitize ]; then
    skip through_the_door 'a library with sanitizers does not load into Python'
    finish
fi
for part in forward gradients refusals; do check through_the_door $part; done
if python3 -c 'import torch' 2>/dev/null; then check through_the_door torch
else skip through_the_door_torch 'PyTorch is not installed'; fi
finish
