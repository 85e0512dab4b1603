# tilegpt. `make help` lists the targets; `make train` and `make test` are all that is needed.
#
#   CUDA=0|1|auto    without, with CUDA; auto, as at first: with, if nvcc and a GPU are found. A build
#                    folder keeps what was asked for last.
#   config=debug|sanitize    assertions and -O0, CUDA as racecheck can follow it; AddressSanitizer
#                            and UBSan (CPU only)

.DEFAULT_GOAL := all
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1)
config ?= release
BUILD  := build$(if $(filter-out release,$(config)),/$(config))
ifeq ($(filter release debug sanitize fuzz,$(config)),)
$(error config=$(config) is unknown; it is release, debug or sanitize)
endif
ifneq ($(filter-out 0 1 auto,$(CUDA)),)
ifeq ($(origin CUDA),command line)
$(error CUDA=$(CUDA) is unknown; it is 0, 1 or auto)
endif
CUDA := # what the environment has is another program's
endif

# What this machine has, found by compiling and linking probes. `make deps` installs what is missing.
ifeq ($(filter help clean deps fuzz,$(MAKECMDGOALS)),)
include $(BUILD)/detected.mk
ifneq ($(filter-out $(FOUND_WITH),$(CUDA)),) # asked for something else than last time
ifeq ($(findstring n,$(firstword -$(MAKEFLAGS))),) # make -n makes what is included all the same
$(BUILD)/detected.mk: look_again
.PHONY: look_again
endif
endif
endif
$(BUILD)/detected.mk: runtime/detect.sh
	@CUDA='$(CUDA)' config='$(config)' sh runtime/detect.sh $@ $(if $(filter train test bench memory,$(MAKECMDGOALS)),--install)

FLAGS_release  := -O3 -march=native
FLAGS_debug    := -O0 -g
FLAGS_sanitize := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
FLAGS_fuzz     := $(FLAGS_sanitize) -fsanitize=fuzzer-no-link # of `make fuzz`
WARN   := -Wall -Wextra -Werror
CFLAGS := -std=c11 -D_GNU_SOURCE -fPIC $(OPENMP) -fno-math-errno -fno-trapping-math $(FLAGS_$(config)) $(WARN) -I. $(DEFINES)
NVFLAGS := -std=c++17 -O3 $(if $(filter debug,$(config)),-lineinfo -DALL_LANES_ARRIVE) -Xcompiler=-fPIC,-Wall,-Wextra -Werror all-warnings -I. $(DEFINES) $(GENCODE)

# Files are written beside their places and moved there whole: a make that is killed leaves no part
# of one for the next make to take. An object's .d is there first, for the new headers it may name.
TO     = -o $@.part && mv $@.part $@
OBJECT = -MMD -MP -MT $@ -MF $@.d.part -c $< -o $@.part && mv $@.d.part $(@:.o=.d) && mv $@.part $@

# Sources on `real` (runtime/real.h) are compiled once for each type.
REAL_C  := $(filter-out layers/layers.c attention/attention.c,$(wildcard layers/*.c attention/*.c))
ONCE_C  := $(wildcard runtime/*.c data/*.c gpt/*.c) layers/layers.c attention/attention.c
ONCE_CU := $(wildcard runtime/*.cu) $(wildcard attention/flash_mma*.cu attention/flash_hopper*.cu) attention/flash_statistics.cu
REAL_CU := $(filter-out $(ONCE_CU),$(wildcard layers/*.cu attention/*.cu))

OBJECTS := $(ONCE_C:%.c=$(BUILD)/%.o) $(REAL_C:%.c=$(BUILD)/%.f32.o) $(REAL_C:%.c=$(BUILD)/%.f64.o)
ifdef NVCC
OBJECTS += $(ONCE_CU:%.cu=$(BUILD)/%.cu.o) $(REAL_CU:%.cu=$(BUILD)/%.f32.cu.o) $(REAL_CU:%.cu=$(BUILD)/%.bf16.cu.o)
endif
TESTS    := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/test_*.c))
# What several tests share.
HELPERS  := $(patsubst %.c,$(BUILD)/%.o,$(filter-out test/test_% test/check_% test/fuzz.c,$(wildcard test/*.c)))
CHECKERS := $(patsubst test/%.c,$(BUILD)/%,$(wildcard test/check_*.c))

DEV      := $(patsubst dev/%.c,$(BUILD)/dev/%,$(filter-out dev/minimal_loop.c,$(wildcard dev/*.c dev/attention/*.c)))
ifdef NVCC
LADDER   := $(patsubst %.cu,$(BUILD)/%.cu.o,$(wildcard dev/attention/*.cu dev/attention/*/*.cu))
DEV      += $(BUILD)/dev/attention/ladder
endif
PREFIX   ?= /usr/local
TEXT      = $$(sh data/tinyshakespeare.sh)

.PHONY: all deps train test fuzz bench memory lib install clean help
.DELETE_ON_ERROR:
.SECONDARY:

all: train_gpt $(CHECKERS)         ## the program and the checkers

deps:                              ## install what is missing (apt)
	@CUDA=$(or $(CUDA),$$(sed -n 's/^FOUND_WITH := //p' $(BUILD)/detected.mk 2>/dev/null)) config='$(config)' sh runtime/detect.sh $(BUILD)/detected.mk --install

train: all                         ## train a small GPT on TinyShakespeare
	@text=$(TEXT) && OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(BUILD)/train_gpt train --data=$$text

test: all lib $(TESTS) $(DEV)      ## every test; ends with the count
	@BUILD=$(BUILD) config=$(config) CUDA=$(CUDA) sh test/run.sh $(TESTS) $(wildcard test/test_*.sh)

fuzz:                              ## fuzz the parsers (clang; minutes=10): see test/fuzz.c
	@command -v clang >/dev/null || { echo 'make fuzz needs clang: apt-get install clang'; exit 1; }
	@MAKEFLAGS= $(MAKE) config=fuzz CC=clang CUDA=0 OPENMP= build/fuzz/fuzz_parsers
	@mkdir -p build/fuzz/corpus
	build/fuzz/fuzz_parsers -max_total_time=$$((60 * $(or $(minutes),10))) -max_len=65536 -timeout=10 -artifact_prefix=build/fuzz/found- build/fuzz/corpus test/corpus

bench: all $(DEV)                  ## time attention and a training step; appends to dev/results/
	$(BUILD)/dev/bench

memory: all $(DEV)                 ## memory and time of a step at growing T, naive and flash
	$(BUILD)/dev/memory && python3 dev/plot_memory.py dev/results/memory.csv

train_gpt: $(BUILD)/train_gpt      # the release build, where one looks for it
	$(if $(filter release,$(config)),@ln -sf $< $@,@:)

$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) $^ $(LIBS) $(TO)
$(BUILD)/check_%: $(BUILD)/test/check_%.o $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) $^ $(LIBS) $(TO)
$(BUILD)/test/test_fuzz: $(BUILD)/test/test_fuzz.o $(BUILD)/test/fuzz.o $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) $^ -lcmocka $(LIBS) $(TO)
$(BUILD)/fuzz_parsers: $(BUILD)/test/fuzz.o $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) -fsanitize=fuzzer $^ $(LIBS) $(TO)
$(BUILD)/test/test_%: $(BUILD)/test/test_%.o $(HELPERS) $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) $^ -lcmocka $(LIBS) $(TO)
$(BUILD)/test/test_bpe: LIBS += -lpcre2-8 # runs GPT-2's pattern, to compare
$(BUILD)/dev/%: $(BUILD)/dev/%.o $(BUILD)/libtilegpt.a
	$(CC) $(CFLAGS) $^ $(LIBS) $(TO)
$(BUILD)/dev/attention/ladder: $(LADDER) $(BUILD)/libtilegpt.a
	@$(if $(LADDER),,echo 'The ladder needs CUDA: see what make found, or CUDA=1' >&2; exit 2)
	$(CC) $(CFLAGS) -Wl,--as-needed $^ $(LIBS) $(TO)
$(BUILD)/libtilegpt.a: $(OBJECTS)
	rm -f $@.part && ar qcs $@.part $^ && mv $@.part $@
# Nothing may be missing in it; but clang leaves the sanitizers' functions to the program.
$(BUILD)/libtilegpt.so: $(OBJECTS)
	$(CC) $(CFLAGS) -shared -Wl,-Bsymbolic $(if $(filter sanitize,$(config)),,-Wl,-z,defs) $^ $(LIBS) $(TO)

$(BUILD)/%.o: %.c $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(OBJECT)
$(BUILD)/%.f32.o: %.c $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_F32 $(OBJECT)
$(BUILD)/%.f64.o: %.c $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_F64 $(OBJECT)
$(BUILD)/train_gpt.o: train_gpt.cu $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -x c $(OBJECT)
$(BUILD)/%.cu.o: %.cu $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) $(OBJECT)
$(BUILD)/%.f32.cu.o: %.cu $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -DREAL_F32 $(OBJECT)
$(BUILD)/%.bf16.cu.o: %.cu $(BUILD)/detected.mk
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -DREAL_BF16 $(OBJECT)

lib: $(BUILD)/libtilegpt.a $(BUILD)/libtilegpt.so  ## the library, static and shared

# The headers that tilegpt.h reaches, in their folders, so that they find each other.
install: lib                       ## the library, its headers and tilegpt.pc into PREFIX
	mkdir -p "$(PREFIX)/lib/pkgconfig" "$(PREFIX)/include/tilegpt"
	cp $(BUILD)/libtilegpt.a $(BUILD)/libtilegpt.so "$(PREFIX)/lib"
	$(CC) -I. -MM tilegpt.h | tr -d '\\' | tr ' ' '\n' | grep '\.h$$' | xargs tar cf - | tar xf - -C "$(PREFIX)/include/tilegpt"
	printf '%s\n' "prefix=$$(cd "$(PREFIX)" && pwd)" 'Name: tilegpt' 'Description: GPT training and FlashAttention' 'Version: 0.1.0' 'Cflags: -I"$${prefix}/include/tilegpt"' 'Libs: -L"$${prefix}/lib" "-Wl,-rpath,$${prefix}/lib" -ltilegpt' 'Libs.private: $(OPENMP) $(LIBS)' > "$(PREFIX)/lib/pkgconfig/tilegpt.pc"

clean:                             ## remove what was built
	rm -rf build train_gpt

help:                              ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
