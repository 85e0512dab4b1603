#!/bin/sh
# Every rung of dev/attention against float64, at lengths that fill no tile, just one, and several
# in part; with a GPU only.
. test/lib.sh
ladder=$build/dev/attention/ladder

# agrees PASS HS CAUSAL: a rung that fails, or is not run, is a line of output.
agrees() {
    for T in 1 17 113 257; do
        problem="--B=2 --NH=3 --T=$T --HS=$2 --causal=$3"
        $limited "$ladder" "$1" $problem --time=false >out 2>&1 || { echo "T=$T:" && cat out; }
        grep -q '^01_naive .*e[-+]' out || { echo "T=$T: no rung was checked" && cat out; }
    done
}

[ -x "$ladder" ] || { skip ladder 'built without CUDA'; finish; }
"$ladder" forward --rung=1 --time=false --B=1 --NH=1 --T=1 >"$scratch/out" 2>&1
[ $? -ne 2 ] || { skip ladder "$(cat "$scratch/out")"; finish; }
for pass in forward backward; do
    for HS in 64 128; do
        for causal in true false; do check agrees $pass $HS $causal; done
    done
done
finish
