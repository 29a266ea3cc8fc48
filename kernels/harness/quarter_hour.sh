#!/bin/sh
# Fifteen minutes on a GPU, in two commands:
#
#   kernels/harness/quarter_hour.sh first     nine and a half minutes: checks, methods and replays side by side, then what
#                                             is timed: whole models, the contests that matter most, training
#   kernels/harness/quarter_hour.sh second    three minutes: compute-sanitizer on the ops that are red, or, if none is,
#                                             a search for launch configurations of three hot shapes, then ncu of the
#                                             contest with the smallest speed-up, or, where ncu is missing or refuses,
#                                             the search for three more shapes
#
# Ops whose checks are red, and the kernel `overlapped` until its own checks are green, are not timed.
#
# Further flags go to every program: `first --device cpu --toy` under TRITON_INTERPRET=1 tries the same without a GPU.
# C++ kernels are not built there (WORKBENCH_NATIVE=0). Nothing needs a network. Every part has a limit, and its results
# are collected every few seconds into at most eight files of $OUT (runs/quarter_hour/out), also when the time is up.
#
#   OPS         ops to time in the first block of contests (CONTESTS_S); the second (EIGHT_BITS_S) is of 8-bit products
#   CHECKED     ops to check (all of them)
#   CHECKS_S, METHODS_S, REPLAYS_S, MODEL_S, CONTESTS_S, EIGHT_BITS_S, SPEED_S, RECOVER_S, GPTQ_S, SECOND_S     seconds of
#               the parts; 0 leaves one out; with CHECKS_S=0, the checks of an earlier first command count
#   MODEL_FLAGS, ONLY     further flags of kernels.harness.model, and the contests to time, as `validate --only` takes them
#   RED         second: ops for compute-sanitizer; by default those that were red in the first command
#   WORK        folder of the parts (runs/quarter_hour)
#   WORKBENCH_COMMIT    the commit, where the checkout was copied without its history
set -u
cd "$(dirname "$0")/../.."
WHICH=${1:-}
[ $# -gt 0 ] && shift
WORK=${WORK:-runs/quarter_hour}
OUT=${OUT:-$WORK/out}
CACHE=${TRITON_CACHE_DIR:-$HOME/.triton/cache}
HOT="int_matmul W4 14336x4096 M=1,int_matmul W4 14336x4096 M=16,int_matmul W4 14336x4096 M=64"
WARM="int_matmul W4 4096x4096 M=1,int_matmul W4 4096x4096 M=64,int_matmul W4 14336x4096 M=256"
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD/.rivals:$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" "$WORK"
case $WHICH in
first)
    for old in "$WORK"/parts/*; do
        case $old:${CHECKS_S:-110} in */checks:0 | */first-checks.log:0) ;; *) rm -rf "$old" ;; esac
    done
    ;;
second) ;;
*) echo "say first or second, not '$WHICH'" >&2; exit 2 ;;
esac
mkdir -p "$WORK/parts"
LOG=$WORK/parts/$WHICH.log
FAILED=$WORK/parts/$WHICH.failed
CHECKS=$WORK/parts/checks
# The cache of compiled kernels that an earlier machine sent back, if it was carried here.
[ -f triton-cache.tar.gz ] && mkdir -p "$CACHE" && tar -xzf triton-cache.tar.gz -C "$CACHE" 2>>"$LOG"

collect() {  # the results so far, as a few files
    cat "$WORK"/parts/*.log >"$OUT/log.txt" 2>/dev/null
    for name in rows.jsonl table.txt record.json; do
        for file in "$WORK"/parts/*/"$name"; do
            [ -f "$file" ] || continue
            [ $name = table.txt ] && echo "== ${file#"$WORK/parts/"}"
            cat "$file"
            [ $name = record.json ] && echo
        done >"$OUT/$name.part"
        mv "$OUT/$name.part" "$OUT/$name"
    done
    cat "$WORK"/parts/model.jsonl "$WORK"/parts/large.jsonl >"$OUT/model.jsonl" 2>/dev/null
    [ -d kernels/tuned ] && cat kernels/tuned/*.json >"$OUT/tuned.json" 2>/dev/null
    return 0
}

finish() {
    trap - EXIT TERM INT
    [ -n "${COLLECTOR:-}" ] && kill "$COLLECTOR" 2>/dev/null
    collect
    find "$WORK/parts" -maxdepth 1 -name core -size -16384k -exec cp {} "$OUT/core" \;  # what the GPU ran when a part stopped
    if [ -d "$CACHE" ]; then  # machine code and its descriptions alone; 16 MiB is what comes back
        (cd "$CACHE" && find . -name '*.cubin' -o -name '*.json' -o -name '*.so' | tar -czf - -T -) >"$OUT/triton-cache.tar.gz" 2>/dev/null
        [ "$(wc -c <"$OUT/triton-cache.tar.gz")" -le 16000000 ] || rm -f "$OUT/triton-cache.tar.gz"
    fi
    exit "$1"
}
trap 'finish 143' TERM INT
trap 'finish $?' EXIT
(while sleep 5; do collect; done) >/dev/null 2>&1 &
COLLECTOR=$!
BEGAN=$(date +%s)

seconds_so_far() { echo $(($(date +%s) - BEGAN)); }

limited() {  # limited NAME SECONDS COMMAND...: under its limit, with its own log
    name=$1 seconds=$2 log=$WORK/parts/$WHICH-$1.log
    shift 2
    [ "$seconds" -gt 0 ] || return 0
    echo "== $name, at $(seconds_so_far) s of the $WHICH command: at most $seconds s" >"$log"
    timeout -k 5 "$seconds" "$@" >>"$log" 2>&1
    code=$?
    echo "== $name ended with $code at $(seconds_so_far) s" | tee -a "$log"
    return $code
}

part() {  # part NAME SECONDS COMMAND...: what goes wrong stops nothing
    limited "$@" || touch "$FAILED"
}

checks() {  # checks NAME SECONDS FLAGS...: `validate` closes by itself a few seconds before its limit
    name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" $PREFIX "$PYTHON" -m kernels.harness.validate --budget $((seconds > 20 ? seconds - 10 : seconds)) \
        --out "$WORK/parts/$name" "$@"
}
PREFIX=

contests() {  # contests NAME SECONDS FLAGS...: nothing is timed that was red in the checks
    checks "$@" --checked "$CHECKS" ${ONLY:+--only "$ONLY"}
}

methods() {  # methods SECONDS: every method and policy on a small model on this GPU, in six processes; results as lines
    [ "$1" -gt 0 ] && command -v nvidia-smi >/dev/null || return 0
    for i in 1 2 3 4 5 6; do
        WORKBENCH_NATIVE=0 TQDM_DISABLE=1 OMP_NUM_THREADS=2 timeout -k 5 "$1" "$PYTHON" -m tests.compress.test_on_a_gpu --real --part $i/6 \
            >"$WORK/parts/methods-$i.log" 2>>"$LOG" &
        pids="${pids:-} $!"
    done
    wait $pids
}

large() {  # large NAME SECONDS FLAGS...: a measurement of seeds/gpu_8b.py
    name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" "$PYTHON" seeds/gpu_8b.py "$@" --out "$WORK/parts/large.jsonl"
}

first() {
    if command -v nvidia-smi >/dev/null; then part clocks 10 nvidia-smi -q -d CLOCK,POWER,PERFORMANCE; fi
    (checks checks "${CHECKS_S:-110}" --checks-only ${CHECKED:+--ops "$CHECKED"} "$@") & right=$!
    (methods "${METHODS_S:-110}") & right="$right $!"
    (large replays "${REPLAYS_S:-0}" replays --rounds 8 --core "$WORK/parts/core" \
        --limit $((${REPLAYS_S:-0} > 50 ? ${REPLAYS_S:-0} - 30 : 20))) & right="$right $!"
    wait $right
    part model "${MODEL_S:-200}" "$PYTHON" -m kernels.harness.model --out "$WORK/parts/model.jsonl" --checked "$CHECKS" \
        --kinds bfloat16,int4,int8,fp8 --ways fused,own \
        --budget $((${MODEL_S:-200} > 20 ? ${MODEL_S:-200} - 15 : 5)) ${MODEL_FLAGS:-} "$@"
    contests contests "${CONTESTS_S:-130}" --ops "${OPS:-int_matmul,kv_decode}" "$@"
    contests eight-bits "${EIGHT_BITS_S:-70}" --ops w8a8_matmul,w4a8_matmul --tokens 1,64,256,2048 "$@"
    large speed "${SPEED_S:-0}" speed --limit $((${SPEED_S:-0} > 20 ? ${SPEED_S:-0} - 10 : 10))
    large recover "${RECOVER_S:-0}" recover --shape llama-1b
    large gptq "${GPTQ_S:-0}" gptq
}

second() {
    RED=${RED-$(sed -n 's/^RED  \([a-z0-9_]*\):.*/\1/p' "$WORK"/parts/first-*.log 2>/dev/null | sort -u | paste -sd, -)}
    if [ -n "$RED" ]; then
        sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
        for tool in memcheck racecheck; do
            PREFIX="$sanitizer --tool $tool --target-processes all --error-exitcode 9"
            checks "$tool" $((${SECOND_S:-170} / 2)) --checks-only --ops "$RED" "$@"
        done
    else
        checks tune $((${SECOND_S:-170} * 2 / 3)) --checked "$CHECKS" --tune --ops int_matmul --only "$HOT" "$@"
        profiled $((${SECOND_S:-170} - $(seconds_so_far) - 5)) && return
        left=$((${SECOND_S:-170} - $(seconds_so_far)))
        [ $left -lt 10 ] || checks more $left --checked "$CHECKS" --tune --ops int_matmul --only "$WARM" "$@"
    fi
}

profiled() {  # profiled SECONDS: what ncu says of the contest with the smallest speed-up; false if it profiled nothing
    ncu=$(command -v ncu || echo /usr/local/cuda/bin/ncu)
    [ -x "$ncu" ] && [ "$1" -gt 0 ] || return 1
    limited ncu "$1" "$ncu" --set full --profile-from-start off --launch-count 8 \
        "$PYTHON" -m kernels.harness.worst "$WORK/parts/contests" "$WORK/parts/eight-bits"
    grep -q '==PROF== Profiling.* passes' "$WORK/parts/second-ncu.log" 2>/dev/null
}

rm -f "$FAILED"
"$WHICH" "$@"
[ ! -e "$FAILED" ]
