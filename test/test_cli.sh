#!/bin/sh
# The command line: what each command says, writes and refuses; interruption, resuming, damage.
. test/lib.sh

sentence='the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.'
shape='--layers=2 --heads=2 --width=32 --context=16 --batch=4 --device=cpu'
common="$shape --data=text.txt --sample-tokens=4"

cd "$scratch" || exit 2
yes "$sentence" | head -n 40 >text.txt
printf 'hello\nworld' >short.txt # 11 tokens; by default the last is for validation
: >empty.txt
printf a >one.txt
printf 'abc\377\376def\n' >not_utf8.txt
cd "$root" || exit 2

# --- Options -------------------------------------------------------------------------------------

help_lists_the_options() {
    for command in train sample eval plan; do
        run "$command" --help
        [ -s err ] && echo "$command --help writes to stderr"
        grep -q "^  $command " out || echo "$command --help does not show the commands"
        grep -q '^  --device=auto|cpu|cuda ' out || echo "$command --help lacks --device"
    done
    run train --help
    grep -q '^  --steps=INT .*\[1000\]$' out || echo "train --help lacks the default of --steps"
    run --help
}

without_a_command_there_is_usage() {
    for command in '' nonsense --steps=3; do
        $limited "$train_gpt" $command >out 2>err
        expect "status of '$command'" $? 2
        grep -q '^usage: train_gpt' err || echo "no usage on stderr for '$command'"
        [ -s out ] && echo "output on stdout for '$command'"
    done
    return 0
}

bad_options_are_refused() {
    train="$train_gpt train $common --run=refused"
    refused 'unknown option --no-such=1' $train --no-such=1
    refused 'did you mean --steps?' $train --stepz=1
    refused 'unknown option --steps=3' "$train_gpt" plan $shape --steps=3
    refused 'stray word "extra"' $train extra
    refused '--steps=abc: expected a whole number' $train --steps=abc
    refused '--steps=1e3: expected a whole number' $train --steps=1e3
    refused '--steps=: expected a whole number' $train --steps=
    refused '--steps needs a value' $train --steps
    refused '--steps=0: expected a whole number from 1' $train --steps=0
    refused '--steps=99999999999999999999: expected' $train --steps=99999999999999999999
    refused '--batch=-1: expected' "$train_gpt" plan --batch=-1
    refused '--dropout=2: expected a number from -1 to 0.99' $train --dropout=2
    refused '--dropout=-0.5: expected -1, or a number from 0 to 0.99' $train --dropout=-0.5
    refused '--dropout=-0.5: expected -1, or' "$train_gpt" plan $shape --dropout=-0.5
    refused '--lr=nan: expected a number' $train --lr=nan
    refused '--lr=1e-3x: expected a number' $train --lr=1e-3x
    refused '--device=tpu: expected auto|cpu|cuda' $train --device=tpu
    refused '--keep-best=maybe: expected true or false' $train --keep-best=maybe
    refused 'no preset .huge.; the presets are shakespeare-cpu' $train --preset=huge
    refused 'no preset .huge.; the presets are shakespeare-cpu' "$train_gpt" plan --preset=huge
    refused 'checkpoint=DIRECTORY is needed' "$train_gpt" sample --device=cpu
    refused 'checkpoint=DIRECTORY is needed' "$train_gpt" eval --device=cpu --data=text.txt
}

impossible_models_are_refused() {
    train="$train_gpt train $common --run=refused"
    refused 'it is 32 with 3 heads' $train --heads=3
    refused 'a head may have up to 256 channels' $train --width=1024
    refused '1 to 4096 layers, not 100000' $train --layers=100000
    refused 'sequences of 32 does not fit .* context of 16' $train --sequence=32
    refused 'bf16 tensors on the CPU' $train --precision=bf16
    refused 'flash_mma does not run on the CPU' $train --attention=flash_mma
    refused 'too large' "$train_gpt" plan --device=cpu --batch=9000000000000000 --context=4096
}

# --- Data ----------------------------------------------------------------------------------------

bad_texts_are_refused() {
    train="$train_gpt train $common --run=refused"
    refused 'missing.txt: No such file' $train --data=missing.txt
    refused 'empty.txt: the text is empty' $train --data=empty.txt
    refused 'one.txt: .*token' $train --data=one.txt
    refused 'one.txt: .*token' $train --data=one.txt --tokenizer=bytes
    refused 'not UTF-8: byte 0xff at offset 3' $train --data=not_utf8.txt
    refused 'has 11 tokens and T = 16 .* largest T that fits is 10' \
        $train --data=short.txt --val-fraction=0
}

# Known before the first step, not found at the first validation.
validation_of_one_token_is_refused() {
    refused '2 tokens' \
        "$train_gpt" train $common --run=refused --data=short.txt --context=9
}

every_byte_is_a_token() {
    run train $common --data=not_utf8.txt --tokenizer=bytes --context=4 --val-fraction=0 \
        --steps=3 --run=bytes
    exist bytes/last/model.safetensors
}

text_without_line_break_trains() {
    printf '%s' "$sentence" >one_line.txt
    run train $common --data=one_line.txt --val-fraction=0 --steps=3 --run=one_line
    exist one_line/last/model.safetensors
    run sample --checkpoint=one_line/last --device=cpu --tokens=4
}

# They would be learnt as they are.
packed_texts_are_refused() {
    gzip -c text.txt >packed.gz && cp packed.gz packed.txt && cp text.txt lines.jsonl
    for data in packed.gz packed.txt lines.jsonl; do
        refused "$data is .*use tokenize first" "$train_gpt" train $common --run=refused \
            --data=$data --tokenizer=bytes
        refused "$data is .*use tokenize first" "$train_gpt" eval --checkpoint=run/best \
            --device=cpu --data=$data
    done
}

# A name that exists is itself, whatever it looks like as a pattern.
names_that_look_like_patterns() {
    mkdir 'odd[1]?*' && cp text.txt 'odd[1]?*/a[b]*.txt'
    run train $common --data='odd[1]?*/a[b]*.txt' --steps=1 --run='odd[1]?*/run'
    run eval --checkpoint='odd[1]?*/run/best' --data='odd[1]?*/a[b]*.txt' --device=cpu
    run tokenize --tokenizer=bytes --input=text.txt --output='odd[1]?*/shards'
    run train $shape --data='odd[1]?*/shards' --sample-tokens=0 --steps=1 --run=odd
    grep -q 'best validation loss' out || echo "the validation part was not found"
    run train $shape --data='odd[1]?*/shards/train_*.bin' --vocabulary=256 --steps=1 --run=odd_glob
    head -c 400 /dev/zero >'odd[1]?*/train.bin' && cp 'odd[1]?*/train.bin' 'odd[1]?*/val.bin'
    run train $shape --data='odd[1]?*' --data-format=nanogpt --vocabulary=50 --steps=1 --run=odd_raw
}

# shard FILE MAGIC TOKENS: the header says TOKENS; there are 400 tokens, 0 to 49 over and over.
shard() {
    {
        word "$2" && word 1 && word "$3" && head -c 1012 /dev/zero
        i=0
        while [ $i -lt 200 ]; do
            word $((i * 2 % 50 + (i * 2 + 1) % 50 * 65536))
            i=$((i + 1))
        done
    } >"$1"
}

token_shards_are_read() {
    mkdir shards
    shard shards/train_0.bin 20240520 400
    shard shards/train_1.bin 20240520 400
    shard val.bin 20240520 400
    run train $shape --data='shards/train_*.bin' --val-data=val.bin --vocabulary=50 --steps=40 \
        --lr=1e-2 --warmup=0 --run=sharded
    # Every token has one successor: that is learnt at once, from ln 50 = 3.9 down.
    awk -F, '$2 == "validation" { seen = 1; if (!($3 < 1)) print "validation loss " $3 }
             END { if (!seen) print "no validation" }' sharded/log.csv
    [ -e sharded/last/tokenizer.json ] && echo "a tokenizer was made up for shards"
    run eval --checkpoint=sharded/best --data=shards --device=cpu
    grep -q '799 predictions' out || echo "eval does not read both shards: $(cat out)"
}

bad_shards_are_refused() {
    train="$train_gpt train $shape --run=refused"
    shard good.bin 20240520 400
    shard magic.bin 20240521 400
    shard count.bin 20240520 401
    head -c 1500 good.bin >cut.bin
    head -c 500 good.bin >stub.bin
    refused 'magic number is 20240521, expected 20240520' $train --data=magic.bin --vocabulary=50
    refused '1824 bytes, expected 1826' $train --data=count.bin --vocabulary=50
    refused '1500 bytes, expected 1824' $train --data=cut.bin --vocabulary=50
    refused '500 bytes, fewer than' $train --data=stub.bin --vocabulary=50
    refused 'no such file' $train --data=none.bin --vocabulary=50
    mkdir no_shards
    refused 'no token shards' $train --data=no_shards --vocabulary=50
    # Tokens are checked as they are read, so the run has begun.
    $limited "$train_gpt" train $shape --data=good.bin --vocabulary=49 --steps=20 --run=beyond \
        >out 2>err
    expect 'status of a token beyond V' $? 2
    grep -q 'token 49 at position .* not in the vocabulary of 49' err || cat err
}

# --- Training ------------------------------------------------------------------------------------

run_directory_is_complete() {
    run train $common --steps=20 --eval-every=10 --lr=3e-3 --run=run
    exist run/flags.txt run/log.csv run/tokenizer.json
    for part in last best; do
        exist run/$part/config.json run/$part/model.safetensors run/$part/tokenizer.json
    done
    exist run/last/optimizer.safetensors run/last/trainer.json
    expect 'the log'\''s header' "$(head -n 1 run/log.csv)" \
        step,split,loss,norm,lr,ms,tokens_per_second
    expect 'the steps' "$(rows run/log.csv train | cut -d, -f1 | tr '\n' ' ')" "$(seq -s ' ' 20) "
    expect 'the validations' "$(rows run/log.csv validation | cut -d, -f1 | tr '\n' ' ')" '10 20 '
    for line in steps=20 lr=0.003 layers=2 data=text.txt tokenizer=char; do
        grep -qx "$line" run/flags.txt || echo "flags.txt lacks $line"
    done
    expect 'what is beside it' "$(ls -d run?* 2>/dev/null)" ''
    refused 'run holds an earlier run; go on with it by --resume' \
        "$train_gpt" train $common --run=run
}

runs_get_directories_of_their_own() {
    mkdir own && cp text.txt own && cd own || return
    run train $common --steps=1
    run train $common --steps=1
    exist runs/shakespeare-cpu/log.csv runs/shakespeare-cpu-2/log.csv
    run train $common --steps=1 --run=new/deep/run
    exist new/deep/run/log.csv
}

# Interrupted in the middle of a cosine, with dropout; a long sample after each step makes time for
# that. The log and every file of the checkpoint must be those of the run that was left alone, but
# for the flags that differ.
interrupted_run_resumes_bit_for_bit() {
    options="$common --steps=20 --warmup=5 --lr=3e-3 --dropout=0.1 --eval-every=5"
    run train $options --run=whole
    $limited "$train_gpt" train $options --sample-every=1 --sample-tokens=1000000 --run=parts \
        >out 2>err </dev/null &
    await has_rows parts/log.csv 1 || { kill $!; return; }
    kill -INT $!
    wait $!
    expect 'status after SIGINT' $? 130
    grep -q '^interrupted after [1-9] steps' out || { echo "not interrupted:" && cat out err; }
    [ "$(rows parts/log.csv train | grep -c .)" -lt 10 ] || echo "the interruption came too late"
    run train --run=parts --resume --sample-every=0 --sample-tokens=4
    same whole/last/model.safetensors parts/last/model.safetensors
    same whole/last/optimizer.safetensors parts/last/optimizer.safetensors
    same whole/last/trainer.json parts/last/trainer.json
    same whole/best/model.safetensors parts/best/model.safetensors
    for split in train validation; do
        expect "the log's $split rows" "$(rows parts/log.csv $split)" "$(rows whole/log.csv $split)"
    done
    grep -qx 'lr=0.003' parts/flags.txt || echo "the resumed run forgot its flags"
}

finished_run_goes_on() {
    options="$common --schedule=constant --warmup=5 --dropout=0.1"
    run train $options --steps=20 --run=straight
    run train $options --steps=10 --run=extended
    run train --run=extended --resume --steps=20
    same straight/last/model.safetensors extended/last/model.safetensors
    expect 'the log' "$(rows extended/log.csv train)" "$(rows straight/log.csv train)"
}

resumed_run_keeps_its_beginning() {
    run train $common --steps=1 --run=begun
    resume="$train_gpt train --run=begun --resume --steps=2"
    cp begun/flags.txt before
    refused '.-resume goes on with .* and --init begins another run' $resume --init=run/last
    refused '.-preset=gpt2-124M: .*shakespeare-cpu' $resume --preset=gpt2-124M
    same begun/flags.txt before
    run train --run=begun --resume --steps=2 --preset=shakespeare-cpu
}

# Saving after each step, most of the time goes into saving, where SIGKILL then strikes.
killed_run_resumes_bit_for_bit() {
    options="$common --steps=60 --save-every=1 --eval-every=0 --dropout=0.1"
    run train $options --run=unharmed
    resume=
    for rows in 5 15 25 35; do
        "$train_gpt" train $options --run=killed $resume >out 2>err </dev/null &
        await has_rows killed/log.csv $rows
        kill -KILL $!
        wait $! 2>/dev/null
        resume=--resume
    done
    run train $options --run=killed --resume
    same unharmed/last/model.safetensors killed/last/model.safetensors
    same unharmed/last/optimizer.safetensors killed/last/optimizer.safetensors
    expect 'the log' "$(rows killed/log.csv train)" "$(rows unharmed/log.csv train)"
    expect 'what the run holds' "$(echo killed/*)" "$(echo unharmed/* | sed s/unharmed/killed/g)"
}

what_is_no_runs_is_kept() {
    for name in log.csv tokenizer.json last best.old; do
        mkdir mine && echo mine >mine/$name
        refused "mine/$name is no run's" "$train_gpt" train $common --run=mine
        expect "mine/$name" "$(cat mine/$name)" mine
        rm -r mine
    done
}

two_processes_in_one_run_are_refused() {
    $limited "$train_gpt" train $common --steps=100000000 --eval-every=0 --save-every=0 --run=busy \
        >out 2>err </dev/null &
    await has_rows busy/log.csv 3 || { kill $!; return; }
    refused 'another process trains in busy' "$train_gpt" train --resume --run=busy
    refused 'another process trains in busy' "$train_gpt" train $common --run=busy
    kill -INT $!
    wait $!
    expect 'status of the first' $? 130
}

sigterm_saves() {
    $limited "$train_gpt" train $common --steps=100000000 --run=terminated >out 2>err </dev/null &
    await has_rows terminated/log.csv 3 || { kill $!; return; }
    kill -TERM $!
    wait $!
    expect 'status after SIGTERM' $? 130
    run eval --checkpoint=terminated/last --data=text.txt --device=cpu
}

# Weight decay of lr * 10 = 100 multiplies every matrix by -99 a step, until float overflows.
non_finite_loss_stops_the_run() {
    $limited "$train_gpt" train $common --steps=50 --lr=10 --min-lr=10 --weight-decay=10 \
        --warmup=0 --schedule=constant --save-every=1 --eval-every=0 --run=diverged >out 2>err
    expect 'status' $? 2
    logged=$(rows diverged/log.csv train | tail -n 1 | cut -d, -f1)
    grep -q "step $((logged + 1)): the loss is .* and the gradient norm" err ||
        echo "after $logged logged steps: $(cat err)"
    grep -iE ',-?(nan|inf)' diverged/log.csv
    grep -q "\"step\":.*\"$logged\"" diverged/last/trainer.json ||
        echo "last/ is not of step $logged"
    run eval --checkpoint=diverged/last --data=text.txt --device=cpu
    grep -iE '^loss -?(nan|inf)' out
    return 0
}

# By default the signal of a file that grows beyond the limit ends a program without a word.
limit_on_file_sizes_is_an_error() {
    mkdir small && ulimit -f 4
    refused 'cannot write small/tokenizer.json' \
        "$train_gpt" tokenizer --input=text.txt --vocab-size=300 --output=small
    refused 'cannot write .*File too large' \
        "$train_gpt" tokenize --tokenizer=bytes --input=text.txt --output=small/shards
    for output in small/model small/model.bin; do
        refused 'cannot write small/model' \
            "$train_gpt" export --checkpoint=run/last --output=$output
    done
    $limited "$train_gpt" train $common --steps=1 --run=small/run >out 2>err </dev/null
    expect 'the status of train' $? 2
    grep -q 'cannot write .*File too large' err || cat err
    expect 'what is left' "$(find small -name '*.tmp*' -o -name '*.tilegpt*')" ''
}

# Nothing improves without learning: the first validation stays the best.
patience_ends_the_run() {
    run train $common --lr=0 --min-lr=0 --steps=100 --eval-every=2 --patience=2 --run=patient
    expect 'the last row' "$(rows patient/log.csv validation | tail -n 1 | cut -d, -f1)" 6
    exist patient/last/trainer.json patient/best/model.safetensors
}

checkpoint_starts_another_run() {
    run train $common --lr=0 --min-lr=0 --steps=1 --init=run/last --run=started
    same run/last/model.safetensors started/last/model.safetensors
    refused 'there is no directory missing' \
        "$train_gpt" train $common --init=missing --run=refused
    refused 'run is not a checkpoint: it has no config.json' \
        "$train_gpt" train $common --init=run --run=refused
}

# The tokenizer that is given is the one that is used, or there is a sentence.
given_tokenizers_are_used() {
    start="train $common --steps=1 --init=run/last"
    refused 'nowhere' "$train_gpt" $start --tokenizer=nowhere --run=refused
    refused 'vocabulary of 256, but the model' "$train_gpt" $start --tokenizer=bytes --run=refused
    run $start --tokenizer=char --run=same_characters
    same run/last/tokenizer.json same_characters/last/tokenizer.json
    run train $common --tokenizer=bytes --steps=1 --run=by_bytes
    run train $common --init=by_bytes/last --tokenizer=run/last --steps=1 --run=other
    same run/last/tokenizer.json other/last/tokenizer.json
    cp -r by_bytes/last bare && rm bare/tokenizer.json
    refused 'tokenizer=DIRECTORY, or bytes' "$train_gpt" train $common --init=bare --run=refused
    run train $common --init=bare --tokenizer=bytes --steps=1 --run=dressed
    same by_bytes/last/tokenizer.json dressed/last/tokenizer.json
    run train --run=other --resume --tokenizer=run/last --steps=2
    run train --run=other --resume --steps=3
    refused 'is another tokenizer' "$train_gpt" train --run=other --resume --tokenizer=bytes
    run tokenize --tokenizer=bytes --input=text.txt --output=byte_shards
    shards="train $shape --data=byte_shards --steps=1 --sample-tokens=0"
    refused 'is another tokenizer' "$train_gpt" $shards --tokenizer=run/last --run=refused
    refused 'nowhere' "$train_gpt" $shards --tokenizer=nowhere --run=refused
    run $shards --tokenizer=byte_shards --run=same_bytes
    refused 'have no tokenizer' "$train_gpt" $shards --data='byte_shards/train*.bin' \
        --vocabulary=256 --tokenizer=bytes --run=refused
}

# A text with more characters than the model has words would read beyond its tables.
larger_vocabulary_is_refused() {
    awk 'BEGIN { for (i = 33; i < 127; i++) printf "%c", i }' >ascii.txt
    yes "$(cat ascii.txt)" | head -n 20 >many.txt
    refused 'vocabulary' "$train_gpt" train $common --data=many.txt --init=run/last --run=refused
    run train $common --data=many.txt --steps=1 --run=many
    cp -r run/best mixed && cp many/tokenizer.json mixed
    refused 'vocabulary' "$train_gpt" sample --checkpoint=mixed --prompt='~' --device=cpu
    refused 'vocabulary' "$train_gpt" eval --checkpoint=mixed --data=many.txt --device=cpu
}

# --- The other commands --------------------------------------------------------------------------

samples_depend_on_the_seed_alone() {
    sample="sample --checkpoint=run/best --device=cpu --tokens=40 --prompt=the"
    for name in first again; do run $sample --seed=5 && mv out $name; done
    same first again
    expect 'the start' "$(head -c 3 first)" the
    run $sample --seed=6
    cmp -s out first && echo "another seed gives the same sample"
    for seed in 1 2; do run $sample --temperature=0 --seed=$seed && mv out greedy$seed; done
    same greedy1 greedy2
    run $sample --top-k=1 --seed=3
    same out greedy1
    refused "character 'Q' (U+0051) .* not among" "$train_gpt" $sample --prompt=Q
    refused 'there is no directory missing' "$train_gpt" sample --checkpoint=missing --device=cpu
}

# Several samples, of which the first is the one that comes alone; a stop text; lines one after the
# other.
prompts_are_continued() {
    sample="sample --checkpoint=run/best --device=cpu --tokens=40"
    run $sample --prompt=the && mv out alone
    grep -q '^40 tokens in .* tokens/s$' err || echo "no speed on stderr"
    run $sample --prompt=the --samples=3
    expect 'the number of samples' "$(grep -c '^--- sample [123] of 3 ---$' out)" 3
    tail -n +2 out | head -c "$(wc -c <alone)" >first && same first alone
    printf the >prompt.txt
    run $sample --prompt-file=prompt.txt && same out alone
    letter=$(tail -c +12 alone | tr -dc a-z | head -c 1)
    run $sample --prompt=the --stop="$letter"
    expect 'what comes before the stop' "the$(tail -c +4 alone | cut -d"$letter" -f1 | head -n 1)" \
        "$(head -n 1 out)"
    printf 'the\nfox ~\nfox' | $limited "$train_gpt" $sample --interactive >out 2>err
    expect 'the status of a conversation' $? 0
    expect 'the first answer' "the$(head -c 40 out)" "$(head -c 43 alone)"
    grep -q "character '~'" err || echo "a line that cannot be encoded is not reported"
    expect 'the number of answers' "$(grep -c '^40 tokens' err)" 2
    run $sample --top-p=0 --seed=3 && mv out narrow && run $sample --temperature=0 && same out narrow
    refused 'interactive goes on with one text' "$train_gpt" $sample --interactive --samples=2
    refused '1 to 1024' "$train_gpt" $sample --samples=1025
    refused '1 to 1024' "$train_gpt" $sample --samples=100000000000
    refused 'not both' "$train_gpt" $sample --prompt=a --prompt-file=prompt.txt
    refused 'no_such_file' "$train_gpt" $sample --prompt-file=no_such_file
}

# A line break is among the 27 characters of this text.
texts_may_have_line_breaks() {
    sample="sample --checkpoint=run/best --device=cpu --tokens=40"
    line_break='
'
    run $sample --prompt="fox${line_break}the"
    printf 'fox\nthe' >prompt.txt && head -c 7 out | same - prompt.txt
    run $sample --prompt=the --stop="$line_break"
    expect 'the lines up to the first line break' "$(grep -c '' out)" 1
    refused 'data=one…: expected one line of text' \
        "$train_gpt" train $common --data="one${line_break}two" --run=refused
    long=$(printf '%060d' 0)
    refused "steps=$long…: expected" "$train_gpt" train $common --steps=${long}x --run=refused
}

output_or_input_that_fails_is_an_error() {
    sample="sample --checkpoint=run/best --device=cpu --tokens=4"
    $limited "$train_gpt" $sample >&- 2>err
    expect 'the status with a closed output' $? 2
    $limited "$train_gpt" $sample --interactive <run >out 2>err
    expect 'the status with a directory for input' $? 2
    grep -q 'input cannot be read' err || cat err
}

# An interrupt ends the text, which is whole up to there, and is the exit status.
interrupt_ends_a_sample() {
    $limited "$train_gpt" sample --checkpoint=run/best --device=cpu --tokens=100000000 >out 2>err &
    await test -s out
    kill -INT $!
    wait $!
    expect 'the status' $? 130
    grep -q 'tokens/s' err || echo "the interrupted sample does not end as others do"
}

# The same model on the same tokens in other batches: only the order of sums differs, a few 1e-7,
# and the six printed decimals of a loss near 3 round by 2e-7 of it.
eval_gives_the_validation_loss() {
    eval="eval --checkpoint=run/best --device=cpu --data=text.txt --val-fraction=0.1"
    best=$(rows run/log.csv validation | cut -d, -f3 | sort -g | head -n 1)
    for batch in 4 7; do
        run $eval --batch=$batch
        within 1e-6 "$(sed -n 's/^loss \([0-9.]*\) .*/\1/p' out)" "$best"
    done
    run $eval --eval-tokens=17
    grep -q '17 predictions' out || cat out
    refused 'missing.txt: No such file' "$train_gpt" $eval --data=missing.txt
    refused 'empty.txt: the text is empty' "$train_gpt" $eval --data=empty.txt --val-fraction=0
    refused 'at least 2 tokens' "$train_gpt" $eval --data=one.txt --val-fraction=0
}

plan_prints_a_table() {
    run plan --preset=gpt2-124M --batch=2 --device=cpu
    grep -q '^gpt2-124M: 124.4 M parameters, 2 sequences of 1024, fp32' out || cat out
    for part in parameters gradients optimizer activations scratch total free; do
        grep -qE "^  $part +[0-9.]+ MiB" out || echo "the plan has no $part"
    done
    # 124,439,808 parameters (and 47 padded words of 768) are 474.7 (and 0.1) MiB in fp32.
    awk '$1 == "parameters" && !($2 >= 474.7 && $2 < 476) { print "parameters: " $2 " MiB" }' out
}

# --- Damage --------------------------------------------------------------------------------------

# damaged NAME: a fresh copy of the run, to be damaged.
damaged() { rm -rf damaged && cp -r run damaged; }

damaged_checkpoints_are_refused() {
    eval="$train_gpt eval --data=text.txt --device=cpu --checkpoint=damaged/last"
    resume="$train_gpt train --run=damaged --resume --steps=30"
    damaged && head -c 50000 run/last/model.safetensors >damaged/last/model.safetensors
    refused 'model.safetensors' $eval
    refused 'model.safetensors' $resume
    damaged && : >damaged/last/model.safetensors
    refused 'model.safetensors' $eval
    damaged && sed 's/"n_layer":.*2/"n_layer": 3/' run/last/config.json >damaged/last/config.json
    refused 'h.2.' $eval
    damaged && sed 's/"n_embd":.*32/"n_embd": 64/' run/last/config.json >damaged/last/config.json
    refused '32.* 64\|64.* 32' $eval
    damaged && echo '{' >damaged/last/config.json
    refused 'config.json is not a JSON object' $eval
    damaged && rm damaged/last/config.json
    refused 'no config.json' $eval
    damaged && rm damaged/last/model.safetensors
    refused 'no model.safetensors' $eval
    damaged && rm damaged/last/tokenizer.json
    refused 'tokenizer.json' $eval
    damaged && rm damaged/last/optimizer.safetensors
    refused 'optimizer.safetensors is missing' $resume
    damaged && rm damaged/last/trainer.json
    refused 'trainer.json is missing' $resume
    damaged && overwrite damaged/last/optimizer.safetensors -4 12345
    refused 'optimizer.safetensors is not what was saved' $resume
    damaged && head -c 100 run/last/trainer.json >damaged/last/trainer.json
    refused 'trainer.json' $resume
    damaged && overwrite damaged/last/model.safetensors -4 2143289344 # a NaN
    refused "the model's loss is not finite" $eval
    damaged && rm -r damaged/last
    refused 'damaged/last' $resume
    damaged && sed 's/^steps=.*/steps=many/' run/flags.txt >damaged/flags.txt
    refused 'flags.txt: --steps=many: expected a whole number' \
        "$train_gpt" train --run=damaged --resume
    refused 'holds no run to resume' "$train_gpt" train --run=never --resume
    refused '.-resume needs --run' "$train_gpt" train --resume
    damaged && run train --run=damaged --resume --steps=22
}

check help_lists_the_options
check without_a_command_there_is_usage
check bad_options_are_refused
check impossible_models_are_refused
check bad_texts_are_refused
check validation_of_one_token_is_refused
check every_byte_is_a_token
check text_without_line_break_trains
check names_that_look_like_patterns
check token_shards_are_read
check bad_shards_are_refused
check run_directory_is_complete # leaves run/ for the tests below
check packed_texts_are_refused
check runs_get_directories_of_their_own
check interrupted_run_resumes_bit_for_bit
check finished_run_goes_on
check resumed_run_keeps_its_beginning
check killed_run_resumes_bit_for_bit
check what_is_no_runs_is_kept
check two_processes_in_one_run_are_refused
check sigterm_saves
check non_finite_loss_stops_the_run
check limit_on_file_sizes_is_an_error
check patience_ends_the_run
check checkpoint_starts_another_run
check given_tokenizers_are_used
check larger_vocabulary_is_refused
check samples_depend_on_the_seed_alone
check prompts_are_continued
check texts_may_have_line_breaks
check output_or_input_that_fails_is_an_error
check interrupt_ends_a_sample
check eval_gives_the_validation_loss
check plan_prints_a_table
check damaged_checkpoints_are_refused
finish
