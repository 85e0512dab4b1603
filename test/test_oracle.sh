#!/bin/sh
# The checkers against numbers of Hugging Face and of float64 attention, for every device, precision
# and family: test/oracle, or all that is in $TILEGPT_ORACLE. And that the checkers can fail.
. test/lib.sh

own=$root/test/oracle
oracle=${TILEGPT_ORACLE:-$own}
case $oracle in /*) ;; *) oracle=$root/$oracle ;; esac

# agrees CHECKER ORACLE DEVICE PRECISION FAMILY
agrees() {
    $limited "$build/$1" "$oracle/$2" --device="$3" --precision="$4" --attention="$5" >out 2>&1 ||
        { echo "status $?:" && grep -v '(tolerance [^ ]*)$' out; }
    grep -q 'all within tolerance' out || echo "there is no verdict"
}

# disagrees CHECKER ORACLE: the status is 1, for a difference, not 2, for a file it cannot use.
disagrees() {
    $limited "$build/$1" "$2" >out 2>&1
    expect "the status of $1" $? 1
    grep -q 'FAILED' out || echo "$1 does not say what differs"
}

one_number_changed_is_found() {
    one=1065353216 # the bits of 1.0f
    cp -r "$own/gpt_a" "$own/attention.safetensors" .
    overwrite gpt_a/model.safetensors -4 $one
    disagrees check_gpt gpt_a
    overwrite attention.safetensors -4 $one
    disagrees check_attention attention.safetensors
}

# 2e-5 of it, where 1e-5 is allowed.
slightly_other_loss_is_found() {
    cp -r "$own/gpt_a" other_loss
    sed 's/4.8155/4.8156/' "$own/gpt_a/expected.json" >other_loss/expected.json
    disagrees check_gpt other_loss
    expect 'what differs' "$(grep ')  FAILED$' out | cut -d' ' -f1)" step0.loss
}

not_a_number_is_found() {
    nan=2143289344 # the bits of a quiet NaN
    cp -r "$own/gpt_a" with_nan && cp "$own/attention.safetensors" nan.safetensors
    overwrite with_nan/model.safetensors -4 $nan
    disagrees check_gpt with_nan
    overwrite nan.safetensors -4 $nan
    disagrees check_attention nan.safetensors
}

# What keeps CUDA from being checked, if anything: the program has none, or there is no GPU. A GPU that
# is there and cannot be used is a failure.
no_cuda=$("$build/train_gpt" plan --device=cuda --preset=shakespeare-cpu 2>&1 >/dev/null |
    cut -d' ' -f2-)
case $no_cuda in *'built without CUDA'*) ;; *) nvidia-smi -L 2>/dev/null | grep -q '^GPU' && no_cuda= ;; esac

# takes FAMILY ORACLE: whether the family runs the oracle's head size.
takes() {
    [ "$1" = flash_hopper ] && [ -f "$oracle/$2/config.json" ] || return 0
    width=$(sed -n 's/.*"n_embd": *\([0-9]*\).*/\1/p' "$oracle/$2/config.json")
    heads=$(sed -n 's/.*"n_head": *\([0-9]*\).*/\1/p' "$oracle/$2/config.json")
    [ $((width / heads % 8)) -eq 0 ]
}

# every CHECKER ORACLE
every() {
    for family in naive flash_v1; do check agrees "$1" "$2" cpu fp32 $family; done
    for kind in 'fp32 naive' 'fp32 flash_v1' 'bf16 naive' 'bf16 flash_v1' 'bf16 flash_mma' \
        'bf16 flash_hopper'; do
        takes "${kind#* }" "$2" || continue
        if [ "$no_cuda" ]; then
            skip "agrees_$1_$2_cuda_$(echo "$kind" | tr ' ' _)" "$no_cuda"
        else
            check agrees "$1" "$2" cuda $kind
        fi
    done
}

for directory in "$oracle"/gpt_*/; do every check_gpt "$(basename "$directory")"; done
every check_attention attention.safetensors
check one_number_changed_is_found
check slightly_other_loss_is_found
check not_a_number_is_found
finish
