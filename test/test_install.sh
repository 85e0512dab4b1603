#!/bin/sh
# The example of the README, compiled and run against an installed copy of the library.
set -u
BUILD=${BUILD:-build}
if [ "${config:-release}" = sanitize ]; then echo '[  SKIPPED ] minimal_loop (an installed library is not built with sanitizers)'; exit 0; fi
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
prefix="$scratch/a name with spaces"

fail() { echo "$2"; echo "[  FAILED  ] $1"; exit 1; }
make -s install BUILD="$BUILD" PREFIX="$prefix" >"$scratch/log" 2>&1 || fail install "$(tail -n 5 "$scratch/log")"
flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs tilegpt) || fail install 'pkg-config does not find tilegpt'
mkdir "$scratch/away" && cp dev/minimal_loop.c "$scratch/away"
(cd "$scratch/away" && eval "${CC:-cc} -std=c11 -Wall -Wextra -Werror minimal_loop.c $flags -o minimal_loop") >"$scratch/log" 2>&1 ||
    fail install "$(cat "$scratch/log")"
echo '[       OK ] install'
sed -n '/<!-- minimal_loop -->/,/<!-- .minimal_loop -->/{/^<!--/d;/^```/d;p}' README.md | cmp -s - dev/minimal_loop.c ||
    fail readme_shows_the_loop 'README.md shows another minimal_loop.c; run python3 dev/readme.py'
echo '[       OK ] readme_shows_the_loop'

# run DEVICE: the loss falls from about log 256 = 5.55 by at least 1.
run() {
    "$scratch/away/minimal_loop" README.md "$1" >"$scratch/log" 2>&1 || fail "minimal_loop_$1" "$(tail -n 3 "$scratch/log")"
    awk '{ loss = $4 } NR == 1 { first = loss } END { exit !(NR == 100 && first > 5.3 && first < 5.8 && loss > 0 && loss < first - 1) }' "$scratch/log" ||
        fail "minimal_loop_$1" "$(sed -n '1p;$p' "$scratch/log")"
    echo "[       OK ] minimal_loop_$1"
}
run cpu
if "$scratch/away/minimal_loop" README.md cuda >"$scratch/log" 2>&1; then run cuda
else echo "[  SKIPPED ] minimal_loop_cuda ($(tail -n 1 "$scratch/log"))"; fi
