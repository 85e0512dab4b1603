#!/bin/sh
# Finds what this machine has by compiling and linking a probe for each library, prints one line for
# each, and writes the answers as Makefile variables. With --install, what is missing is installed
# with apt first.
#
#   sh runtime/detect.sh OUTPUT.mk [--install]        environment: CC CUDA NVCC NCCL_HOME config
set -u
output=$1
mkdir -p "$(dirname "$output")"
scratch=$(mktemp -d 2>/dev/null) || { echo "no temporary folder can be made in TMPDIR, which is ${TMPDIR:-/tmp}" >&2; exit 2; }
trap 'rm -rf "$scratch"' EXIT
CC=${CC:-cc}

# probe NAME FLAGS LIBS <<source: succeeds if the source compiles and links.
probe() {
    cat >"$scratch/probe.c"
    $CC $2 "$scratch/probe.c" -o "$scratch/probe" $3 >"$scratch/$1.log" 2>&1
}
have_cc() { echo 'int main(void) { return 0; }' | probe cc '' ''; }
have_openmp() { printf '#include <omp.h>\nint main(void) { return omp_get_max_threads() == 0; }\n' | probe openmp -fopenmp ''; }
have_cjson() { printf '#include <cjson/cJSON.h>\nint main(void) { return !cJSON_CreateObject(); }\n' | probe cjson '' -lcjson; }
have_zlib() { printf '#include <zlib.h>\nint main(void) { return zlibVersion() == 0; }\n' | probe zlib '' -lz; }
have_pcre2() { printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\nint main(void) { return pcre2_config(PCRE2_CONFIG_JIT, 0) < 0; }\n' | probe pcre2 '' -lpcre2-8; }
have_cmocka() { printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\nint main(void) { return cmocka_run_group_tests_name("", (const struct CMUnitTest[]){{0}}, 0, 0); }\n' | probe cmocka '' -lcmocka; }
have_blas() { printf '#include <cblas.h>\nint main(void) { return cblas_sdot(0, 0, 1, 0, 1) != 0; }\n' | probe blas '' -lopenblas; }
have_mpi() {
    command -v mpicc >/dev/null && mpi_flags=$(mpicc --showme:compile 2>/dev/null) && mpi_libs=$(mpicc --showme:link 2>/dev/null) &&
        printf '#include <mpi.h>\nint main(int c, char **v) { return MPI_Init(&c, &v); }\n' | probe mpi "$mpi_flags" "$mpi_libs"
}

if [ "${2:-}" = --install ]; then
    missing=
    have_cc || missing="$missing gcc libc6-dev"
    have_cjson || missing="$missing libcjson-dev"
    have_zlib || missing="$missing zlib1g-dev"
    have_cmocka || missing="$missing libcmocka-dev"
    have_pcre2 || missing="$missing libpcre2-dev"
    have_blas || missing="$missing libopenblas-openmp-dev"
    have_mpi || missing="$missing libopenmpi-dev openmpi-bin"
    command -v pkg-config >/dev/null || missing="$missing pkg-config"
    if [ -n "$missing" ]; then
        sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
        if ! command -v apt-get >/dev/null; then
            echo "make deps: this system has no apt-get; install the equivalents of:$missing" >&2
        else
            echo "make deps: installing$missing"
            $sudo apt-get update -qq >"$scratch/apt.log" 2>&1
            DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >>"$scratch/apt.log" 2>&1 ||
                { echo "make deps: apt-get could not install$missing:" >&2; tail -n 3 "$scratch/apt.log" >&2; }
        fi
    fi
fi

say() { printf '  %-9s %s\n' "$1" "$2"; }
need() { echo "tilegpt needs $1; 'make deps' installs it ($2)" >&2; rm -f "$output"; exit 2; }
have_cc || need 'a C compiler' 'gcc, libc6-dev'
have_cjson || need 'cJSON' libcjson-dev
have_zlib || need zlib zlib1g-dev
libs='-lcjson -lz -lm' defines= openmp='-fopenmp-simd -Wno-unknown-pragmas' nvcc= gencode=

if have_openmp; then openmp=-fopenmp; say OpenMP found; else say OpenMP 'not found: one CPU thread'; fi
if have_blas; then say OpenBLAS 'found'; libs="-lopenblas $libs" defines="$defines -DTILEGPT_BLAS"
else say OpenBLAS 'not found: slow matrix products on the CPU'; fi
if have_mpi; then say MPI "found, $(mpicc --showme:version 2>/dev/null | sed 's/.*Open MPI/Open MPI/; s/ (.*//')"; libs="$mpi_libs $libs" defines="$defines -DTILEGPT_MPI $mpi_flags"
else say MPI 'not found: one process only'; fi

# CUDA: machine code for the GPU that is here, else for sm_80 and sm_90a, and PTX of the newest.
for candidate in "${NVCC:-}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
    [ -z "$nvcc" ] && [ -x "${candidate:-/nonexistent}" ] && nvcc=$candidate
done
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | tr -d .)
case "${CUDA:-auto}" in
0) nvcc=; say CUDA 'off (CUDA=0): CPU only' ;;
1) [ -n "$nvcc" ] || need 'nvcc for CUDA=1 (looked in $NVCC, PATH and /usr/local/cuda/bin)' 'the CUDA toolkit' ;;
*) if [ -z "$nvcc" ]; then say CUDA 'nvcc not found in $NVCC, PATH or /usr/local/cuda/bin: CPU only'
   elif [ -z "$capability" ]; then nvcc=; say CUDA 'nvcc found but no GPU: CPU only (CUDA=1 builds for CUDA all the same)'; fi ;;
esac
[ "${config:-}" = sanitize ] && [ -n "$nvcc" ] && { nvcc=; say CUDA 'off (config=sanitize): CPU only'; }
if [ -n "$nvcc" ]; then
    cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    version=$($nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [ "${version%%.*}" -ge 12 ] || need "CUDA 12 or newer (nvcc here is $version)" 'the CUDA toolkit'
    targets=
    for sm in ${capability:-80 90}; do
        [ "$sm" = 90 ] && sm=90a
        targets="$targets sm_$sm" gencode="$gencode -gencode arch=compute_$sm,code=sm_$sm"
    done
    [ -n "$capability" ] || gencode="$gencode -gencode arch=compute_90,code=compute_90"
    say CUDA "found, $version, for$targets"
    libs="-L$cuda/lib64 -lcublasLt -lcudart_static -lstdc++ -ldl -lrt -lpthread $libs -Wl,-rpath,$cuda/lib64"
    defines="$defines -DTILEGPT_CUDA -I$cuda/include"
    nccl_flags=${NCCL_HOME:+-I$NCCL_HOME/include} nccl_libs="${NCCL_HOME:+-L$NCCL_HOME/lib} -lnccl"
    if printf '#include <nccl.h>\nint main(void) { int v; return ncclGetVersion(&v); }\n' | probe nccl "-I$cuda/include $nccl_flags" "-L$cuda/lib64 $nccl_libs -Wl,-rpath,$cuda/lib64"
    then say NCCL 'found'; libs="$nccl_libs $libs" defines="$defines -DTILEGPT_NCCL $nccl_flags"
    else say NCCL 'not found (NCCL_HOME and the usual places): one GPU only'; fi
fi

cat >"$output.part" <<END && mv "$output.part" "$output" # an interruption leaves no part of it
FOUND_WITH := ${CUDA:-$([ -n "$nvcc" ] && echo 1 || echo 0)}
OPENMP := $openmp
LIBS := $libs
DEFINES := $defines
NVCC := $nvcc
GENCODE := $gencode
END
