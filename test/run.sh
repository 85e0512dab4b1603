#!/bin/sh
# Runs test programs and scripts and ends with one line: N passed, N failed, N skipped.
#
# Each prints cmocka's lines, "[       OK ] name", "[  FAILED  ] name", "[  SKIPPED ] name". A program
# that dies, or exits with a failure that it did not report, counts as one failed test.
set -u
# Threads that wait sleep: spinning ones would slow each other down on a machine that is also busy.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
log=$(mktemp) && trap 'rm -f "$log"' EXIT
passed=0 failed=0 skipped=0
for program in "$@"; do
    echo "== $program"
    case $program in *.sh) sh "$program" ;; *) "./$program" ;; esac >"$log" 2>&1
    status=$?
    cat "$log"
    ok=$(grep -c '^\[       OK \]' "$log")
    bad=$(grep '^\[  FAILED  \] [^0-9 ]' "$log" | sort -u | grep -c .)
    skip=$(grep '^\[  SKIPPED \] [^0-9 ]' "$log" | sort -u | grep -c .)
    [ $status -ne 0 ] && [ "$bad" -eq 0 ] && { echo "[  FAILED  ] $program ended with status $status"; bad=1; }
    [ $((ok + bad + skip)) -eq 0 ] && { echo "[  FAILED  ] $program ran no test"; bad=1; }
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
done
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
