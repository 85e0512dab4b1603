#!/bin/sh
# Models from and for other programs on the command line: exports and what comes back from them,
# files of llm.c, models in several files, multiple-choice examples; and the damaged ones, each
# refused with a sentence.
. test/lib.sh

shape='--layers=2 --heads=2 --width=32 --context=16 --batch=4 --device=cpu'
common="$shape --data=text.txt --sample-tokens=0"

cd "$scratch" || exit 2
yes 'the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.' |
    head -n 40 >text.txt
run train $common --steps=20 --lr=1e-2 --warmup=0 --run=run >complaints || cat complaints
eval="eval --device=cpu --data=text.txt --batch=4"
run $eval --checkpoint=run/last && mv out expected_loss
cd "$root" || exit 2

# --- Exports -------------------------------------------------------------------------------------

export_keeps_every_bit() {
    run export --checkpoint=run/last --output=directory
    same run/last/model.safetensors directory/model.safetensors
    same run/last/config.json directory/config.json
    same run/last/tokenizer.json directory/tokenizer.json
    [ -e directory/optimizer.safetensors ] && echo "an export holds the optimizer"
    run export --checkpoint=directory --output=model.bin
    run export --checkpoint=model.bin --output=again
    same run/last/model.safetensors again/model.safetensors
    expect 'size of the file' "$(wc -c <model.bin)" \
        "$((1024 + 4 * (128 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32)))"
}

# A file of llm.c is a model everywhere; its tokenizer is the one beside it.
files_of_llmc_are_models() {
    mkdir llmc && cp run/last/tokenizer.json llmc
    run export --checkpoint=run/last --output=llmc/model.bin
    run $eval --checkpoint=llmc/model.bin
    same out expected_loss
    run train $common --init=llmc/model.bin --lr=0 --min-lr=0 --steps=1 --run=from_llmc
    same run/last/model.safetensors from_llmc/last/model.safetensors
    sample='--device=cpu --tokens=20 --prompt=the --temperature=0'
    run sample --checkpoint=run/last $sample && mv out text
    run sample --checkpoint=llmc/model.bin $sample
    same out text
}

# bf16 keeps 8 bits of each parameter, fp16 11; the loss near 1 moves by less than these say.
export_of_fewer_bits() {
    for case in bf16:1e-2:directory_bf16 fp16:1e-3:directory_fp16 bf16:1e-2:llmc/bf16.bin; do
        precision=${case%%:*} name=${case##*:} tolerance=${case#*:}
        run export --checkpoint=run/last --output="$name" --precision=$precision
        run $eval --checkpoint="$name"
        within "${tolerance%:*}" "$(cut -d' ' -f2 out)" "$(cut -d' ' -f2 expected_loss)"
    done
    expect 'bytes of bf16' $(($(wc -c <llmc/bf16.bin) * 2 - 1024)) "$(wc -c <llmc/model.bin)"
}

bad_exports_are_refused() {
    export="$train_gpt export --checkpoint=run/last"
    refused 'output=DIRECTORY or --output=FILE.bin is needed' $export
    refused 'checkpoint=DIRECTORY is needed' "$train_gpt" export --output=refused
    refused 'no directory missing' "$train_gpt" export --checkpoint=missing --output=refused
    refused 'precision=int8: expected auto|fp32|bf16|fp16' $export --output=no --precision=int8
    refused 'fp32 or bf16 numbers, not fp16' $export --output=no.bin --precision=fp16
    refused 'No such file or directory' $export --output=no/where
    refused 'No such file or directory' $export --output=no/where.bin
    refused 'run/last holds the state of a training' $export --output=run/last
}

exports_replace_nothing_but_exports() {
    export="$train_gpt export --checkpoint=run/last"
    for target in directory again; do
        run export --checkpoint=run/last --output=$target --precision=bf16
        run export --checkpoint=run/last --output=$target
        same run/last/model.safetensors $target/model.safetensors
    done
    run export --checkpoint=run/last --output=model.bin
    for name in best best/ best.old last.old; do
        refused "run/$name is where a run keeps a checkpoint" $export --output=run/$name
    done
    for time in first second; do run export --checkpoint=run/last --output=run/exported; done
    # Killed between the two renames of a save.
    cp -r run killed && mv killed/last killed/last.old && : >killed/last.old/.tilegpt
    refused 'killed/last.old holds the state of a training' $export --output=killed/last
    mv killed/last.old elsewhere.old
    refused 'killed/last is where a run keeps a checkpoint' $export --output=killed/last
    refused 'elsewhere.old holds the state of a training' $export --output=elsewhere
    cp text.txt text.bin && cp text.bin before
    refused 'text.bin is there and is no model of llm.c' $export --output=text.bin
    ln -s model.bin link.bin && ln -s nowhere dangling.bin
    for link in link.bin dangling.bin; do
        refused "$link is there and is a symbolic link" $export --output=$link
    done
    same text.bin before
    for file in config.json generation_config.json model.safetensors tokenizer.json; do
        mkdir foreign && echo '{"model_type": "gpt2"}' >foreign/$file && cp foreign/$file before
        refused "foreign/$file is there, and no earlier export wrote it" $export --output=foreign
        same foreign/$file before && rm -r foreign
    done
    mkdir notes && echo mine >notes/README.md
    run export --checkpoint=run/last --output=notes
    grep -q mine notes/README.md
}

# --- Imports -------------------------------------------------------------------------------------

# shards INDEX: a checkpoint whose one file is named by an index with this text.
shards() {
    rm -rf parts && cp -r run/best parts && mv parts/model.safetensors parts/part.safetensors
    echo "$1" >parts/model.safetensors.index.json
}

models_of_several_files() {
    load="$train_gpt $eval --checkpoint=parts"
    shards '{"weight_map": {"transformer.wte.weight": "part.safetensors"}}'
    run $eval --checkpoint=parts
    shards '{"weight_map": {"transformer.wte.weight": "../run/best/model.safetensors"}}'
    refused 'not the name of a file beside it' $load
    shards '{"weight_map": {"transformer.wte.weight": "absent.safetensors"}}'
    refused 'names absent.safetensors, which is missing' $load
    shards '{"weight_map": {"lm_head.weight": "part.safetensors"}}'
    refused 'promises a tensor in part.safetensors that is not there' $load
    shards '{"weight_map": {"a": '
    refused 'it has no weight_map' $load
    shards '[]'
    refused 'it has no weight_map' $load
    shards '{"weight_map": {"transformer.wte.weight": "config.json"}}'
    refused 'config.json is not a safetensors file' $load
}

# changed EXPRESSION: a checkpoint whose model was edited by sed, which must not change its length.
changed() {
    rm -rf bad && cp -r run/best bad
    LC_ALL=C sed "$1" run/best/model.safetensors >bad/model.safetensors
    cmp -s bad/model.safetensors run/best/model.safetensors && echo "nothing changed by $1"
    expect "length after $1" "$(wc -c <bad/model.safetensors)" \
        "$(wc -c <run/best/model.safetensors)"
}

damaged_safetensors_are_refused() {
    load="$train_gpt $eval --checkpoint=bad"
    start="$train_gpt train $common --init=bad --run=refused"
    convert="$train_gpt export --checkpoint=bad --output=refused"
    for command in "$load" "$start" "$convert"; do
        changed 's/"shape":\[32,96\]/"shape":[96,32]/'
        refused 'has shape (96, 32); this model needs (32, 96)' $command
        changed 's/ln_f\.bias/ln_f.bios/'
        refused 'has no tensor ln_f.bias' $command
        changed 's/\[0,\([0-9]*\)[0-9]\]/[-1,\1]/'
        refused 'are not .begin, end., 0 <= begin' $command
        changed 's/"data_offsets":\[\([1-9][0-9]*\)[0-9],/"data_offsets":[\11,/'
        refused 'bytes by its data_offsets but' $command
        # The last two tensors, of one size, in one place.
        at='\[32\],"data_offsets":' place='\[[0-9,]*\]'
        changed "s/\(ln_f.weight[^[]*$at\)\($place\)\(.*$at\)$place/\1\2\3\2/"
        refused "they overlap another's" $command
        changed 's/F32/F99/'
        refused 'unknown dtype "F99"' $command
        changed 's/^/&/;s/"dtype"/"ctype"/'
        refused 'must have exactly a dtype' $command
        # A header of 2^60 bytes.
        cp run/best/model.safetensors bad && overwrite bad/model.safetensors 0 0
        overwrite bad/model.safetensors 4 268435456
        refused 'its header would take 1152921504606846976 bytes' $command
        head -c 10000 run/best/model.safetensors >bad/model.safetensors
        refused 'is cut short' $command
        : >bad/model.safetensors
        refused 'has 0 bytes, too few' $command
    done
}

damaged_files_of_llmc_are_refused() {
    load="$train_gpt $eval --checkpoint=bad.bin"
    bad() { cp llmc/model.bin bad.bin && overwrite bad.bin "$1" "$2"; }
    bad 0 20240520
    refused 'its magic number is 20240520, expected 20240326' $load
    bad 4 2
    refused 'has version 2 of llm.c.s model format; 3 (fp32) and 5 (bf16)' $load
    bad 4 5
    refused 'has something after its end' $load
    bad 16 4294967295
    refused 'number 4 of its header is -1' $load
    bad 16 3
    refused 'is cut short' $load
    bad 28 1
    refused 'its padded vocabulary is 1, less than' $load
    bad 0 20240326 && head -c 60000 llmc/model.bin >bad.bin
    refused 'has 60000 bytes, expected' $load
    head -c 1000 llmc/model.bin >bad.bin
    refused 'fewer than the header' $load
    refused 'its magic number is' "$train_gpt" export --checkpoint=text.txt --output=refused
}

# --- Multiple choice -----------------------------------------------------------------------------

# pair LOW HIGH: two numbers of 16 bits.
pair() { word $(($1 + 65536 * $2)); }

# choices EXAMPLES LAST: a file said to have so many examples, with one, of 28 bytes: after the
# context 1 2 comes 3 4, which is right, or 5 LAST.
choices() {
    word 20240522 && word 1 && word "$1" && word 28 && head -c 1008 /dev/zero
    pair 65535 28 && pair 0 0 && pair 2 2 && pair 1 2 && pair 2 3 && pair 4 2 && pair 5 "$2"
}

multiple_choices_are_judged() {
    choose="eval --checkpoint=run/best --device=cpu"
    choices 1 6 >choices.bin
    run $choose --data=choices.bin
    grep -qE '^accuracy (0.0000 \| 0|1.0000 \| 1) of 1 examples$' out || cat out
    { choices 2 6 && head -c 28 /dev/zero; } >bad.bin
    refused 'example 1 is cut short or damaged, at byte 1052' "$train_gpt" $choose --data=bad.bin
    choices 1 5000 >bad.bin
    refused 'token 5000, which is not in the vocabulary' "$train_gpt" $choose --data=bad.bin
    head -c 1040 choices.bin >bad.bin
    refused 'cut short' "$train_gpt" $choose --data=bad.bin
    refused 'the model reads 2' "$train_gpt" $choose --data=choices.bin --sequence=2
}

check export_keeps_every_bit
check files_of_llmc_are_models
check export_of_fewer_bits
check bad_exports_are_refused
check exports_replace_nothing_but_exports
check models_of_several_files
check damaged_safetensors_are_refused
check damaged_files_of_llmc_are_refused
check multiple_choices_are_judged
finish
