#!/bin/sh
# The layout's rules, checked on the sources: headers compile alone, as C and as C++; includes point
# downward only; the trainer stays small and has no kernels.
set -u
cd "$(dirname "$0")/.." || exit 1
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
failures=0

# report NAME FILE: one of cmocka's lines; the test has failed if the file lists complaints.
report() {
    echo "[ RUN      ] $1"
    if [ -s "$2" ]; then
        cat "$2"
        echo "[  FAILED  ] $1"
        failures=$((failures + 1))
    else
        echo "[       OK ] $1"
    fi
}

# compiles COMPILER HEADER: alone, and twice, which its guard must make harmless. A header written
# on `real` is given it; OpenMP is optional, so its pragmas may be unknown.
compiles() {
    real=
    grep -q '^#include "runtime/real.h"' "$2" && real=-DREAL_F32
    printf '#include "%s"\n#include "%s"\n' "$2" "$2" |
        $1 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-unknown-pragmas -I. $real -fsyntax-only - 2>&1
}

# headers_compile LANGUAGE COMPILER
headers_compile() {
    name=headers_compile_alone_as_$1
    compiler=$2
    if ! command -v "${compiler%% *}" >/dev/null; then
        echo "no ${compiler%% *} here (CC and CXX choose the compilers)"
        echo "[  SKIPPED ] $name"
        return
    fi
    for header in runtime/*.h layers/*.h attention/*.h data/*.h gpt/*.h; do
        compiles "$compiler" "$header" || echo "$header does not compile alone as $1"
    done >"$scratch/$name"
    report "$name" "$scratch/$name"
}

# includes_only DIRECTORY ALLOWED…: every quoted include must name one of the allowed directories.
includes_only() {
    directory=$1
    shift
    allowed=$(echo "$*" | sed 's/ /|/g')
    for file in "$directory"/*.[ch] "$directory"/*.cu "$directory"/*.cuh; do
        [ -f "$file" ] || continue
        grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$file" |
            grep -vE "\"($allowed)/[^/\"]+\"" |
            sed "s|^|$file:|; s|\$|   (only $* may be included here)|"
    done
}

headers_compile c "${CC:-cc} -std=c11 -x c"
headers_compile cxx "${CXX:-c++} -std=c++17 -x c++"

{
    includes_only runtime runtime
    includes_only layers layers runtime
    includes_only attention attention runtime
    includes_only data data runtime
    includes_only gpt gpt attention layers data runtime
} >"$scratch/includes"
report includes_point_downward "$scratch/includes"

{
    ls data/*.cu* gpt/*.cu* 2>/dev/null
    grep -nE '#[[:space:]]*include.*(cuda|nccl|cublas)' data/*.[ch] gpt/*.[ch]
} >"$scratch/cuda"
report data_and_gpt_know_no_cuda "$scratch/cuda"

{
    lines=$(wc -l <train_gpt.cu) || echo "there is no train_gpt.cu"
    [ "${lines:-0}" -le 500 ] || echo "train_gpt.cu has $lines lines; at most 500 are allowed"
    grep -n '__global__' train_gpt.cu
} >"$scratch/trainer" 2>&1
report trainer_is_small_and_has_no_kernels "$scratch/trainer"

[ $failures -eq 0 ]
