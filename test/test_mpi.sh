#!/bin/sh
# Several ranks, on the CPU: the same losses as one, runs that go on with another number of ranks,
# and ranks that die, hang or disagree.
. test/lib.sh

# In a sanitizer build: Open MPI leaks, in modules that it unloads, so their leaks cannot be told from
# ours; the other tests look for those.
export ASAN_OPTIONS=detect_leaks=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun='mpirun'
mpirun --version 2>/dev/null | grep -q 'Open MPI' && mpirun='mpirun --oversubscribe'
shape='--layers=2 --heads=2 --width=32 --context=16 --device=cpu'
common="$shape --data=text.txt --sample-tokens=0 --steps=20 --warmup=5 --eval-every=10"
endless="$shape --data=text.txt --steps=100000000"

cd "$scratch" || exit 2
yes 'the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.' |
    head -n 40 >text.txt
# Records the process of each rank; BAD_RANK gets one option more.
cat >rank.sh <<'END'
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
echo $$ >"pid.$rank"
[ "$rank" = "${BAD_RANK:-none}" ] && set -- "$@" "$BAD_OPTION"
exec "$@"
END
cd "$root" || exit 2

# ranks COUNT ARGUMENT…: train on so many ranks, with the output shown if that fails.
ranks() {
    count=$1
    shift
    $limited $mpirun -n "$count" "$train_gpt" train "$@" >out 2>err </dev/null && return
    echo "$count ranks: train $* ended with status $?:" && cat out err
}

# same_losses RUN RUN: the logged losses, norms and validations agree. Sums over ranks have another
# order than sums over a batch: a few 1e-7, which twenty updates amplify.
same_losses() {
    for column in 3 4; do
        within 1e-5 "$(rows "$1/log.csv" train | cut -d, -f$column)" \
            "$(rows "$2/log.csv" train | cut -d, -f$column)"
    done
    within 1e-5 "$(rows "$1/log.csv" validation | cut -d, -f3)" \
        "$(rows "$2/log.csv" validation | cut -d, -f3)"
}

# running PID: not gone, and not a zombie, which has no command line.
running() { [ -n "$(tr -d '\0' 2>/dev/null <"/proc/$1/cmdline")" ]; }

ranks_equal_one_rank() {
    run train $common --batch=12 --run=one
    ranks 1 $common --batch=12 --run=launched
    ranks 2 $common --batch=6 --run=two
    ranks 3 $common --batch=4 --run=three
    same_losses launched one
    same_losses two one
    same_losses three one
}

accumulation_equals_one_batch() {
    run train $common --batch=12 --run=batch
    run train $common --batch=2 --accumulate=6 --run=accumulated
    ranks 2 $common --batch=3 --accumulate=2 --run=two_accumulated
    ranks 3 $common --batch=2 --accumulate=2 --run=three_accumulated
    same_losses accumulated batch
    same_losses two_accumulated batch
    same_losses three_accumulated batch
}

other_number_of_ranks_resumes() {
    options="$common --schedule=constant"
    run train $options --batch=12 --run=straight
    ranks 2 $options --batch=6 --steps=10 --run=by_one
    cp -r by_one by_two && cp -r by_one by_three
    run train --run=by_one --resume --steps=20 --batch=12
    ranks 2 --run=by_two --resume --steps=20
    ranks 3 --run=by_three --resume --steps=20 --batch=4
    for run in by_one by_two by_three; do same_losses $run straight; done
}

# lose_rank SIGNAL RANK SENTENCE OPTION…: a rank of three gets the signal while training. The others
# must end within a minute, with a failure and a sentence that names the rank.
lose_rank() {
    signal=$1 lost=$2 sentence=$3
    shift 3
    $limited $mpirun -n 3 sh rank.sh "$train_gpt" train $endless --batch=2 --run=lost "$@" \
        >out 2>err </dev/null &
    await has_rows lost/log.csv 3 || { kill $!; return; }
    begin=$(date +%s)
    kill -"$signal" "$(cat "pid.$lost")"
    wait $!
    status=$?
    seconds=$(($(date +%s) - begin))
    [ $status -ne 0 ] || echo "the run ended with status 0"
    [ $seconds -lt 60 ] || echo "that took $seconds s"
    grep -q "$sentence" out err || { echo "nothing says \"$sentence\":" && cat err; }
    for rank in 0 1 2; do
        running "$(cat pid.$rank)" && echo "rank $rank is left" && kill -KILL "$(cat pid.$rank)"
    done
    rm -rf lost pid.*
}

killed_rank_ends_the_run() { lose_rank KILL 1 'rank 1'; }
stopped_rank_ends_the_run() { lose_rank STOP 2 'rank 2 has been silent' --rank-timeout=5; }
stopped_first_rank_ends_the_run() { lose_rank STOP 0 'rank 0 has been silent' --rank-timeout=5; }

# fails PATTERN RANK OPTION: the run ends with a failure, and without a run directory, when this
# rank, or "all", is given an option that does not work.
fails() {
    option=$3
    [ "$2" = all ] && everywhere=$3 || everywhere=
    BAD_RANK=$2 BAD_OPTION=$option $limited $mpirun -n 2 sh rank.sh "$train_gpt" train $common \
        --batch=6 --run=refused $everywhere >out 2>err </dev/null
    status=$?
    case $status in 0 | 124 | 137) echo "status $status with $option on $2" ;; esac
    grep -qe "$1" err || { echo "nothing says \"$1\":" && cat err; }
    [ -e refused ] && echo "a run directory was left with $option on $2"
    rm -rf refused
}

bad_input_ends_all_ranks() {
    fails 'missing.txt: No such file' all --data=missing.txt
    fails 'missing.txt: No such file' 1 --data=missing.txt
    fails 'missing.txt: No such file' 0 --data=missing.txt
    fails 'unknown option --stepz=1' all --stepz=1
    fails 'unknown option --stepz=1' 1 --stepz=1
    ranks 1 $common --batch=6 --steps=1 --run=earlier
    fails 'holds an earlier run' all --run=earlier
}

# mpirun passes both on as SIGTERM. Open MPI kills what is still there a second later, which is too
# short for a loaded machine, so it is told to wait for three.
signals_save_a_checkpoint() {
    export OMPI_MCA_odls_base_sigkill_timeout=3
    for signal in INT TERM; do
        $limited $mpirun -n 2 sh rank.sh "$train_gpt" train $endless --batch=6 --run=$signal \
            >out 2>err </dev/null &
        await has_rows $signal/log.csv 3 || { kill $!; return; }
        kill -$signal $!
        # Open MPI 4.1.4's mpirun itself crashes now and then while it ends after a signal; what the
        # shell says of that is not ours.
        { wait $! && echo "status 0 after SIG$signal"; } 2>/dev/null
        exist $signal/last/optimizer.safetensors
        step=$(rows $signal/log.csv train | tail -n 1 | cut -d, -f1)
        ranks 2 --run=$signal --resume --steps=$((step + 2))
        expect 'the rows' "$(rows $signal/log.csv train | grep -c .)" $((step + 2))
    done
}

more_ranks_than_gpus_are_refused() {
    $limited $mpirun -n $((gpus + 1)) "$train_gpt" train $common --device=cuda --run=crowded \
        >out 2>err </dev/null
    status=$?
    case $status in 0 | 124 | 137) echo "status $status" ;; esac
    grep -q "$((gpus + 1)) ranks were started on a node with $gpus GPU" err || cat err
    [ -e crowded ] && echo "a run directory was left"
    return 0
}

tests='ranks_equal_one_rank accumulation_equals_one_batch other_number_of_ranks_resumes
    killed_rank_ends_the_run stopped_rank_ends_the_run stopped_first_rank_ends_the_run
    bad_input_ends_all_ranks signals_save_a_checkpoint'
if ! command -v mpirun >/dev/null; then
    missing='there is no mpirun'
elif $limited $mpirun -n 1 "$train_gpt" plan --device=cpu 2>&1 | grep -q 'built without MPI'; then
    missing='the program was built without MPI'
fi
for test in $tests; do
    if [ "${missing:-}" ]; then skip "$test" "$missing"; else check "$test"; fi
done

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
usable=$($limited "$train_gpt" plan --device=cuda --preset=shakespeare-cpu 2>&1 >/dev/null)
if [ "${missing:-}" ]; then
    skip more_ranks_than_gpus_are_refused "$missing"
elif [ "$gpus" -eq 0 ] || [ "$usable" ]; then
    usable=${usable#train_gpt: }
    skip more_ranks_than_gpus_are_refused "${usable:-nvidia-smi finds no GPU}"
else
    check more_ranks_than_gpus_are_refused
fi
finish
