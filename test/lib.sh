# What the test scripts share; they read it with `. test/lib.sh` from the repository root.
#
# A test is a function that prints what is wrong and nothing else. It runs in a subshell inside a
# scratch directory; it has failed if it printed anything or ended with a status other than 0. The
# lines are cmocka's, which test/run.sh counts.
#
# One thread for each process: the models are tiny, and sums then always have the same order.
set -u
export OMP_NUM_THREADS=1
root=$PWD
case ${BUILD:=build} in /*) build=$BUILD ;; *) build=$root/$BUILD ;; esac
train_gpt=$build/train_gpt
[ -x "$train_gpt" ] || { echo "there is no $BUILD/train_gpt: build it, or set BUILD" >&2; exit 2; }
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
failures=0

# check FUNCTION [ARGUMENT…]: runs one test, whose name is the words joined.
check() {
    name=$(echo "$*" | tr " " _)
    echo "[ RUN      ] $name"
    (cd "$scratch" && "$@") >"$scratch/complaints" 2>&1
    status=$?
    if [ $status -eq 0 ] && [ ! -s "$scratch/complaints" ]; then
        echo "[       OK ] $name"
        return
    fi
    cat "$scratch/complaints"
    [ $status -eq 0 ] || echo "the test ended with status $status"
    echo "[  FAILED  ] $name"
    failures=$((failures + 1))
}

# skip NAME REASON
skip() { echo "[  SKIPPED ] $1 ($2)"; }

# For what could hang: a limit on the wall time, far above what a loaded machine needs. It passes
# signals on, so a process started with it in the background can be sent them by $!.
limited='timeout --foreground -k 30 120'

# run ARGUMENT…: train_gpt, with its output in the files out and err, which are shown if it fails.
run() {
    $limited "$train_gpt" "$@" >out 2>err </dev/null && return
    echo "train_gpt $* ended with status $?:" && cat out err
}

# refused PATTERN COMMAND…: the command ends with status 2, prints nothing but one sentence, which
# matches, and leaves no file behind. A run it is not to make is to be called "refused".
refused() {
    pattern=$1
    shift
    before=$(find . | sort)
    sentence=$($limited "$@" 2>&1 >stdout.txt </dev/null)
    status=$?
    said=$(cat stdout.txt) && rm stdout.txt
    [ $status -eq 2 ] || echo "status $status, expected 2: $*"
    [ -z "$said" ] || echo "unexpected output \"$said\": $*"
    echo "$sentence" | grep -qe "$pattern" || echo "\"$sentence\" does not say \"$pattern\": $*"
    [ "$(echo "$sentence" | grep -c .)" -eq 1 ] || echo "not one line: \"$sentence\": $*"
    [ "$(find . | sort)" = "$before" ] || echo "files were left behind by: $*"
    rm -rf refused
}

# expect WHAT FOUND EXPECTED
expect() { [ "$2" = "$3" ] || echo "$1 is \"$2\", expected \"$3\""; }

# exist FILE…
exist() { for file in "$@"; do [ -e "$file" ] || echo "$file is missing"; done; }

# same FILE FILE
same() { cmp "$1" "$2"; }

# await COMMAND…: polls until it succeeds, for at most a minute.
await() {
    tries=1200
    until "$@"; do
        [ $((tries -= 1)) -gt 0 ] || { echo "a minute has passed without: $*"; return 1; }
        sleep 0.05
    done
}

# rows FILE SPLIT: the log's lines of one split, without the two columns that are times.
rows() { grep ",$2," "$1" | cut -d, -f1-5; }

# has_rows FILE COUNT: whether the log has that many training steps already.
has_rows() { [ -f "$1" ] && [ "$(rows "$1" train | grep -c .)" -ge "$2" ]; }

# within TOLERANCE LIST LIST: numbers, pair by pair, differ by at most the tolerance relative to
# the second. Fails on lists of different lengths and on anything that is not a number.
within() {
    printf '%s\n' "$2" >list_a
    printf '%s\n' "$3" >list_b
    paste -d' ' list_a list_b | awk -v tolerance="$1" '
        { difference = $1 - $2; if (difference < 0) difference = -difference
          size = $2 < 0 ? -$2 : $2
          if (NF != 2 || $0 !~ /^[-+.e0-9]+ [-+.e0-9]+$/ || !(difference <= tolerance * size))
              print "line " NR ": " $0 " differ by more than " tolerance " of the second" }
        END { if (NR == 0) print "nothing to compare" }'
}

# word NUMBER: four bytes, little endian.
word() {
    for shift in 1 256 65536 16777216; do
        printf "\\$(printf %03o $(($1 / shift % 256)))"
    done
}

# overwrite FILE OFFSET NUMBER: four bytes of it. A negative offset counts from the end.
overwrite() {
    offset=$2
    [ "$offset" -ge 0 ] || offset=$(($(wc -c <"$1") + offset))
    word "$3" | dd of="$1" bs=1 seek="$offset" conv=notrunc 2>/dev/null
}

finish() {
    [ $failures -eq 0 ]
    exit
}
