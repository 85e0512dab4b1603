#!/bin/sh
# dev/attention's programs that check what is said of attention: io_report and trace.
. test/lib.sh

# traced OPTION…: trace ends with 0, which it does only if tiled and exact results agree.
traced() {
    $limited "$build/dev/attention/trace" "$@" >out 2>err || cat err out
    grep -q 'exact   O' out || echo 'there is no exact result'
}

# has PATTERN COLUMN EXPECTED: a number of the one line of `out` that matches.
has() {
    found=$(grep -e "$1" out | awk -v column="$2" '{ print $column }')
    expect "column $2 of \"$1\"" "$found" "$3"
}

# T = 4096 and 128 of everything else; the reads are T d (1 + 2 T/Br) elements of two bytes.
report_counts_as_by_hand() {
    $limited "$build/dev/attention/io_report" --device=cpu >out || echo "status $?"
    has 'Q, K, V, S, O:' 17 81920
    has 'Q, K, V, S, O:' 18 160.0
    has 'backward that recomputes' 8 125%
    reads=$(awk 'BEGIN { printf "%.1f", 4096 * 128 * (1 + 2 * 4096 / 128) * 2 / 1e6 }')
    grep -q "Here $reads MB, against 3.1 MB" out || echo "the algorithm's reads are not $reads MB"
    [ "$(grep -c '^[0-9]*\. "' out)" -eq 10 ] || echo 'there are not ten claims'
}

# Query tiles of 128 see 1, 2, … 32 tiles of keys.
report_skips_what_causality_hides() {
    $limited "$build/dev/attention/io_report" --device=cpu --mask=causal >out || echo "status $?"
    reads=$(awk 'BEGIN { printf "%.1f", (4096 + 2 * 128 * 32 * 33 / 2) * 128 * 2 / 1e6 }')
    grep -q "Here $reads MB, against 3.1 MB" out || echo "the algorithm's reads are not $reads MB"
}

trace_refuses_a_block_beyond_the_last() {
    refused 'give 0 … 2' "$build/dev/attention/trace" --block=3
}

report_refuses_to_measure_without_a_gpu() {
    refused 'for a GPU' "$build/dev/attention/io_report" --device=cpu --run=naive
}

check traced
check traced --causal --length=7 --rows=4 --columns=3 --head-size=3
check traced --causal --length=64 --rows=64 --columns=5 --head-size=16
check traced --length=63 --rows=64 --columns=64 --seed=7
check traced --length=1 --rows=1 --columns=1 --head-size=1
check trace_refuses_a_block_beyond_the_last
check report_counts_as_by_hand
check report_skips_what_causality_hides
check report_refuses_to_measure_without_a_gpu
finish
