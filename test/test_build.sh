#!/bin/sh
# What make and the test programs do when something is wrong: they stop and say so.
. test/lib.sh

# make_here ARGUMENT…: make, with a build folder of its own.
make_here() { MAKEFLAGS= make -C "$root" BUILD="$PWD/b" CUDA=0 "$@" >out 2>&1; }

failed_detection_ends_make() {
    make_here CC=false train_gpt
    expect 'the status' $? 2
    grep -q 'needs a C compiler' out || cat out
    grep -e 'No rule' -e 'up to date' out
    [ ! -e b/detected.mk ] || echo 'there are answers all the same'
}

make_n_keeps_what_was_found() {
    make_here "$PWD/b/detected.mk" || cat out
    cp b/detected.mk before
    make_here -n CUDA=auto lib || cat out
    same b/detected.mk before
}

# The compiler is killed, and make with it, when a part of the object is written.
killed_make_leaves_no_part() {
    cat >cc <<'END'
#!/bin/sh
case "$*" in *' -c '*)
    while [ "$1" != -o ]; do shift; done
    echo cut >"$2"
    kill -9 0 ;;
esac
exec cc "$@"
END
    chmod +x cc
    MAKEFLAGS= setsid -f -w make -C "$root" BUILD="$PWD/b" CUDA=0 CC="$PWD/cc" \
        "$PWD/b/runtime/error.o" >out 2>&1
    [ -n "$(find b/runtime -type f)" ] || echo 'no object was begun'
    [ ! -e b/runtime/error.o ] || echo 'the part is where the object belongs'
    make_here "$PWD/b/runtime/error.o" || cat out
}

detection_without_a_temporary_folder() {
    refused TMPDIR env TMPDIR=/nonexistent sh "$root/runtime/detect.sh" found.mk
}

filters_match_a_test() {
    refused 'matches no test' env TEST_FILTER=draws "$build/test/test_sample"
}

strides_are_whole_numbers() {
    for stride in 0 -3 abc 3x; do
        TEST_STRIDE=$stride "$build/test/test_sample" >out 2>err
        expect "the status with TEST_STRIDE=$stride" $? 2
        grep -q 'no whole number' err || cat err
    done
}

large_strides_leave_one_case() {
    for stride in 61 1000000 4294967296; do
        for program in test_decode test_sample; do
            TEST_STRIDE=$stride "$build/test/$program" >out 2>&1 || cat out
        done
    done
}

check failed_detection_ends_make
check make_n_keeps_what_was_found
check killed_make_leaves_no_part
check detection_without_a_temporary_folder
check filters_match_a_test
check strides_are_whole_numbers
check large_strides_leave_one_case
finish
