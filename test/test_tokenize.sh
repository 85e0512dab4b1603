#!/bin/sh
# The commands tokenizer and tokenize, and training on what they write: what they say, write and
# refuse; being killed, a full disk.
. test/lib.sh

sentence='the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.'
model='--layers=1 --heads=2 --width=16 --context=16 --batch=2 --steps=2 --device=cpu --warmup=0'
model="$model --sample-tokens=4 --eval-tokens=32"

cd "$scratch" || exit 2
export XDG_CACHE_HOME="$scratch/cache"
yes "$sentence" | head -n 200 >text.txt
gzip -c text.txt >text.txt.gz
: >empty.txt
printf 'hello worl' >ten.txt
printf 'one two\r\nthree four\r\n' >crlf.txt
printf 'caf\351 \377 et cetera\n' >latin.txt
printf 'zero \0 and \0\0 more\n' >zeros.txt
head -c 100 text.txt.gz >cut.gz
printf '{"text": "fine"}\n{"text": "broken\n' >broken.jsonl
mkdir folder
"$train_gpt" tokenizer --input=text.txt --vocab-size=300 --output=learnt >/dev/null || exit 2
cd "$root" || exit 2

# --- tokenizer -----------------------------------------------------------------------------------

tokenizer_says_what_it_did() {
    run tokenizer --input=text.txt crlf.txt --vocab-size=300 --output=two
    grep -q 'MB of text, .* words, .* of them distinct' out || echo "no count of words"
    grep -q 'written to two: 300 tokens, the last is <|endoftext|>' out || cat out
    run tokenizer --input=ten.txt --vocab-size=300 --output=few
    grep -q 'the vocabulary ends below 300' out && grep -q '257 tokens' out || cat out
    run tokenizer --input 'te*t.txt' --input text.txt.gz --vocab-size=300 --output=again
    same again/tokenizer.json learnt/tokenizer.json # twice the text: the same merges
}

tokenizer_refuses() {
    learn="$train_gpt tokenizer --output=refused --vocab-size=300"
    refused '--input=FILES is needed' $learn
    refused '--output=DIRECTORY is needed' "$train_gpt" tokenizer --input=text.txt
    refused '--vocab-size=256: expected a whole number from 257' $learn --vocab-size=256 --input=x
    refused 'no.txt: there is no such file' $learn --input=no.txt
    refused 'folder: is a directory' $learn --input=folder
    refused 'empty.txt: there is no text' $learn --input=empty.txt
    refused 'cut.gz: this gzip file is cut short' $learn --input=text.txt cut.gz
    refused 'broken.jsonl: line 2 is not JSON' $learn --input=broken.jsonl
    refused 'text.txt' "$train_gpt" tokenizer --input=text.txt --vocab-size=300 --output=text.txt
}

# --- tokenize ------------------------------------------------------------------------------------

manifest_tells_the_truth() {
    run tokenize --tokenizer=learnt --input=text.txt.gz --output=shards --shard-tokens=1000
    grep -q '^train  .* tokens, 1 document, [0-9]* shards$' out || cat out
    exist shards/train_000000.bin shards/train_000001.bin shards/val_000000.bin
    same learnt/tokenizer.json shards/tokenizer.json
    # Pairs of lines: a shard's name, its hash.
    sed -n 's/.*"name":.*"\(.*\)".*/\1/p' shards/manifest.json >names
    sed -n '/"train":/,$s/.*"sha256":.*"\(.*\)".*/\1/p' shards/manifest.json >hashes
    paste -d' ' hashes names | sed 's/ /  /' >sums
    expect 'shards in the manifest' "$(grep -c . sums)" "$(ls shards/*.bin | grep -c .)"
    (cd shards && sha256sum --quiet -c ../sums)
    grep -q "$(sha256sum <text.txt.gz | cut -d' ' -f1)" shards/manifest.json || echo "no input hash"
    before=$(ls -l --time-style=full-iso shards)
    run tokenize --tokenizer=learnt --input=text.txt.gz --output=shards/ --shard-tokens=1000
    grep -q 'was complete already' out || cat out
    expect 'the directory' "$(ls -l --time-style=full-iso shards)" "$before"
}

odd_texts_work() {
    for text in ten.txt crlf.txt latin.txt zeros.txt; do
        for tokenizer in learnt bytes; do
            run tokenize --tokenizer=$tokenizer --input=$text --val-fraction=0 --output=odd
            rm -r odd
        done
        run tokenize --tokenizer=bytes --input=$text --print
        tr ' ' '\n' <out | grep . >ids
        od -An -v -tu1 -w1 $text | tr -d ' ' | grep -vx 10 | same - ids
    done
    for text in ten.txt crlf.txt zeros.txt; do
        run tokenize --tokenizer=char --input=$text --val-fraction=0 --output=odd
        rm -r odd
    done
}

print_gives_a_line_for_a_line() {
    printf 'ab\n\nc\r\nd' >lines.txt
    run tokenize --tokenizer=bytes --input=lines.txt --print
    printf '97 98\n\n99 13\n100\n' | same - out
    printf '{"text": "a\\nb"}\n\n{"text": ""}\n' >lines.jsonl
    run tokenize --tokenizer=bytes --input lines.jsonl lines.txt --print
    printf '97 10 98\n\n97 98\n\n99 13\n100\n' | same - out
    "$train_gpt" tokenize --tokenizer=bytes --input=/dev/stdin --print <lines.txt | head -n 1 >out
    printf '97 98\n' | same - out
    refused 'broken.jsonl: line 2 is not JSON' "$train_gpt" tokenize --tokenizer=bytes \
        --input=broken.jsonl --format=jsonl --output=refused
    run tokenize --tokenizer=bytes --input=broken.jsonl --format=text --print
    expect 'lines' "$(grep -c . out)" 2
    "$train_gpt" tokenize --tokenizer=bytes --input=text.txt --print 2>err >/dev/full
    expect 'status on a full output' $? 2
}

tokenize_refuses() {
    tokenize="$train_gpt tokenize --tokenizer=learnt --output=refused"
    refused '--output=DIRECTORY is needed, or --print' "$train_gpt" tokenize --input=text.txt
    refused '--input=FILES is needed' $tokenize
    refused 'nowhere' $tokenize --input=text.txt --tokenizer=nowhere
    refused 'no.txt: there is no such file' $tokenize --input=text.txt no.txt
    refused 'folder: is a directory' $tokenize --input=folder
    refused '/dev/null: is not a file' $tokenize --input=/dev/null
    refused 'empty.txt: there is no text' $tokenize --input=empty.txt
    refused 'empty.txt: there is no text' $tokenize --input=empty.txt --tokenizer=bytes
    refused 'text' $tokenize --input=empty.txt --tokenizer=char
    refused 'cut.gz: this gzip file is cut short' $tokenize --input=cut.gz
    refused 'broken.jsonl: line 2 is not JSON' $tokenize --input=text.txt broken.jsonl
    refused 'latin.txt: is not UTF-8: byte 0xe9 at offset 3' $tokenize --input=latin.txt \
        --tokenizer=char
    refused 'leaves 9 tokens for training and 1 for validation' $tokenize --input=ten.txt \
        --tokenizer=bytes
    run tokenize --tokenizer=char --input=ten.txt --output=letters --val-fraction=0
    refused "crlf.txt, from byte 0 on: the character 'n'" $tokenize --tokenizer=letters \
        --input=ten.txt crlf.txt --val-fraction=0
    touch folder/mine
    refused 'folder exists and is not empty' $tokenize --input=text.txt --output=folder
    rm folder/mine
}

# A full disk leaves nothing half-written; a killed run is gone on with.
interrupted_runs_go_on() {
    for i in 1 2 3 4 5 6; do # of several batches
        awk -v n=$i 'BEGIN { for (i = 0; i < 20000; i++)
            printf "{\"text\": \"document %d\"}\n", n * i }'
    done >many.jsonl
    tokenize="tokenize --tokenizer=learnt --input=many.jsonl --shard-tokens=200000"
    run $tokenize --output=whole
    # Files may have 350 KB, a shard has 400 KB: nothing can be gone on with, and nothing stays.
    (ulimit -f 683 && exec "$train_gpt" $tokenize --output=full) >out 2>err
    expect 'status with a full disk' $? 2
    grep -q 'cannot write .*File too large' err || cat err
    expect 'lines of it' "$(grep -c . err)" 1
    [ -e full ] && echo "a directory was made in spite of a full disk"
    # Killed when a shard is there.
    "$train_gpt" $tokenize --output=killed >out 2>err &
    await test -e killed.tmp/progress.json -o -e killed
    kill -9 $! 2>/dev/null
    wait $! 2>/dev/null
    run $tokenize --output=killed
    diff -r whole killed
    [ ! -e killed.tmp ] || echo "killed.tmp stayed"
}

# What has the name of a replacement's directory and was not made by one stays as it is.
others_directories_stay() {
    tokenize="$train_gpt tokenize --tokenizer=bytes --input=text.txt"
    for name in thesis.tmp thesis.old; do
        mkdir $name && echo mine >$name/thesis.txt
        refused "thesis.$(echo $name | cut -d. -f2) is in the way" $tokenize --output=thesis
        expect 'the text' "$(cat $name/thesis.txt)" mine
        mkdir elsewhere && mv $name/thesis.txt elsewhere && rmdir $name
        ln -s elsewhere $name
        refused 'is in the way' $tokenize --output=thesis
        expect 'the text behind a link' "$(cat $name/thesis.txt)" mine
        rm $name && rm -r elsewhere
    done
    : >thesis.tmp
    refused 'is in the way' $tokenize --output=thesis
    rm thesis.tmp
    refused 'cannot create no/where.tmp: No such file' $tokenize --output=no/where
    mkdir thesis.tmp # empty: no one loses anything
    run tokenize --tokenizer=bytes --input=text.txt --output=thesis
    expect 'what is there' "$(echo $(ls -A thesis))" \
        'manifest.json tokenizer.json train_000000.bin val_000000.bin'
    rm -r thesis
}

# A lock on OUTPUT.tmp tells of another process.
two_do_not_write_one_directory() {
    command -v flock >/dev/null || return 0
    mkdir both.tmp
    flock both.tmp/.tilegpt -c "'$train_gpt' tokenize --tokenizer=bytes --input=text.txt \
        --output=both" >out 2>err
    expect 'status of the second' $? 2
    grep -q 'another process writes both' err || cat err
    expect 'what is there' "$(ls -A both.tmp)" .tilegpt
    run tokenize --tokenizer=bytes --input=text.txt --output=both
    [ ! -e both.tmp ] || echo "both.tmp stayed"
}

missing_shards_are_noticed() {
    tokenize="tokenize --tokenizer=learnt --input=text.txt --shard-tokens=1000"
    run $tokenize --output=parts
    run train $model --data=parts --run=parts_run
    for damage in 'rm parts/train_000001.bin' 'truncate -s -2 parts/val_000000.bin'; do
        rm -r parts && run $tokenize --output=parts
        $damage
        pattern=$(echo "$damage" | sed 's/.* //')
        refused "$pattern" "$train_gpt" $tokenize --output=parts
        refused "$pattern" "$train_gpt" train $model --data=parts --run=refused
        refused "$pattern" "$train_gpt" eval --checkpoint=parts_run/last --data=parts --device=cpu
    done
    run $tokenize --output=undivided --val-fraction=0
    run eval --checkpoint=parts_run/last --data=undivided --device=cpu --eval-tokens=32
    grep -q 'undivided has no validation part' err || echo "eval does not say what it evaluates"
}

# A file that grows after it was looked at and before it is encoded.
changed_files_are_noticed() {
    awk 'BEGIN { for (i = 0; i < 3000000; i++) print i, i * 7 }' >growing.txt
    "$train_gpt" tokenize --tokenizer=learnt --input=growing.txt --output=grown >out 2>err &
    await test -e grown.tmp -o -e grown
    echo more >>growing.txt
    wait $!
    expect 'status' $? 2
    grep -q 'growing.txt: changed while it was read' err || cat err
    [ ! -e grown ] && [ ! -e grown.tmp ] || echo "something stayed"
    rm growing.txt
}

# --- training ------------------------------------------------------------------------------------

tokens_are_trained_on() {
    run tokenize --tokenizer=learnt --input=text.txt --output=data
    run train $model --data=data --run=sharded
    grep -q 'validation loss' out || echo "the validation of the directory was not found"
    same sharded/last/tokenizer.json learnt/tokenizer.json
    run train $model --data=text.txt --tokenizer=learnt --run=direct
    expect 'the first losses' "$(rows direct/log.csv train | head -n 1 | cut -d, -f1)" 1
    run train $model --data=text.txt --init=direct/last --run=went_on
    grep -q '"vocab_size":[[:space:]]*300' went_on/last/config.json || echo "another vocabulary"
    run sample --checkpoint=went_on/last --prompt='the quick' --tokens=4 --device=cpu
    grep -q '^the quick' out || cat out
    refused 'nowhere' "$train_gpt" train $model --data=text.txt --tokenizer=nowhere --run=refused
}

# The cache is for large texts: a damaged entry is made again, and none is no error.
cache_is_a_help_only() {
    yes "$sentence" | head -c 17000000 >large.txt
    train="train $model --data=large.txt --tokenizer=learnt"
    run $train --run=cached
    entry=$(dirname "$(ls cache/tilegpt/*/manifest.json)")
    shard=train_000000.bin before=$(sha256sum <"$entry/$shard")
    # The last two are ids of the vocabulary, and beyond it.
    for damage in "truncate -s -2 $shard" "rm $shard" 'truncate -s 0 manifest.json' \
        "overwrite $shard 2000 65537" "overwrite $shard 2000 4294967295"; do
        (cd "$entry" && $damage)
        run $train --run="$(echo $damage | tr ' ' _)"
        grep -q 'the kept tokens of the text are made again: ' err || echo "no line after $damage"
        expect "lines after $damage" "$(grep -c . err)" 1
        expect "the shard after $damage" "$(sha256sum <"$entry/$shard")" "$before"
    done
    : >a_file
    for place in HOME= HOME="$scratch/a_file" XDG_CACHE_HOME=/proc/none; do
        (unset XDG_CACHE_HOME; export "$place"
            run $train --run="without_$(echo "$place" | tr /= __)")
        expect 'lines that say so' "$(grep -c 'are not kept' err)" 1
    done
    expect 'the losses' "$(rows without_HOME_/log.csv train)" "$(rows cached/log.csv train)"
    rm large.txt
}

bare_tokens_are_trained_on() {
    mkdir bare
    yes '\1\0\2\0\3\0' | head -n 100 | tr -d '\n' >codes
    printf "$(cat codes)" >bare/train.bin
    cp bare/train.bin bare/val.bin
    run train $model --data=bare --data-format=nanogpt --vocabulary=4 --run=from_bare
    grep -q 'validation loss' out || echo "val.bin was not found"
    train="$train_gpt train $model --run=refused --data-format=nanogpt"
    refused 'token 3 at position 2' $train --data=bare --vocabulary=3
    refused 'train.bin: is not a token shard' "$train_gpt" train $model --data=bare --run=refused
    printf x >>bare/train.bin
    refused 'train.bin: has 601 bytes' $train --data=bare/train.bin --vocabulary=4
}

# --- Hugging Face --------------------------------------------------------------------------------

# For a text: the ids of the tokenizers library, one line for each line.
print_as_hugging_face() {
    python3 - "$1" "$2" <<'END'
import sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
for line in open(sys.argv[2], newline="\n", encoding="utf-8"):
    print(*tokenizer.encode(line.removesuffix("\n")).ids)
END
}

hugging_face_encodes_the_same() {
    text=${TINYSHAKESPEARE:-data/tinyshakespeare.txt}
    case $text in /*) ;; *) text=$root/$text ;; esac
    [ -e "$text" ] || text=text.txt
    run tokenizer --input="$text" --vocab-size=1024 --output=shakespeare
    run tokenize --tokenizer=shakespeare --input="$text" --print
    print_as_hugging_face shakespeare "$text" | same - out
}

check tokenizer_says_what_it_did
check tokenizer_refuses
check manifest_tells_the_truth
check odd_texts_work
check print_gives_a_line_for_a_line
check tokenize_refuses
check interrupted_runs_go_on
check others_directories_stay
check two_do_not_write_one_directory
check missing_shards_are_noticed
check changed_files_are_noticed
check tokens_are_trained_on
check cache_is_a_help_only
check bare_tokens_are_trained_on
if python3 -c 'import tokenizers' 2>/dev/null; then check hugging_face_encodes_the_same
else skip hugging_face_encodes_the_same 'python3 has no module tokenizers'; fi
finish
