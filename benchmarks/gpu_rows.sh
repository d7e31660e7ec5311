#!/bin/bash
# Measures again what the tables of the docs about GPUs come from, one step after another:
#
#   bash benchmarks/gpu_rows.sh FOLDER [STEP...]      all steps unless some are named
#
# Rows and logs go to FOLDER. A step that fails or takes too long ends neither the others nor the
# run, and its rows so far are kept. Nothing else may use the GPU. Seconds are those of an H200.
set -u
here=$(dirname "$0") out=${1:?a folder for the rows} && shift
mkdir -p "$out"
engine="python3 -m tightkv bench engine --shape llama-3.1-8b --repeats 2 --out $out/vllm_engine.jsonl"
caches="--kv auto --kv fp8 --kv k4v4 --kv k3v3 --kv k2v2"
rivals="--kv nvfp4 --kv int4_per_token_head --kv turboquant_4bit_nc"

step() {  # name, seconds at most, command
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    case " $wanted " in *" $name "*) ;; *) return ;; esac
    timeout --kill-after 10 "$limit" "$@" >> "$out/$name.log" 2>&1
    echo "$name: exit code $?, $((SECONDS - begin)) s"
}

wanted=${*:-engine few ragged ragged_rivals mixed long rivals agents speculation decode more heads ragged_decode seal prefill export mla}
step engine 480 $engine $caches --size 8x32k --prefill 2048 --prefill 32768 --new-lengths
step few 300 $engine $caches --size 1x2k
step ragged 720 $engine $caches --size 32x8k --size 32x6k-10k --size 128x2k --size 128x1k-3k \
    --size 256x1k --size 256x512-1536 --prefill 2048
step ragged_rivals 900 $engine --kv auto --kv k4v4 $rivals --size 128x1k-3k --size 32x6k-10k --repeats 1
step mixed 600 $engine --kv auto --kv fp8 --kv k4v4 --kv k2v2 --mixed 112 --kv-memory 52GiB
step long 300 $engine --kv auto --kv k4v4 --prefill 65536 --prefill 131000
step rivals 600 $engine $rivals --size 32x8k --size 8x32k
step agents 420 python3 "$here/agent_replay.py" --agents 24 --gpu-gib 1 --host-gib 4 --seconds 40 \
    --out "$out/agent_replay.jsonl"
step speculation 240 python3 "$here/speculation.py" --out "$out/speculation.jsonl"
step decode 300 python3 "$here/decode_shapes.py" --out "$out/gpu_decode_20_shapes.jsonl"
step more 240 python3 "$here/decode_shapes.py" --shapes more --against bf16 --against sdpa --out "$out/gpu_decode_more_shapes.jsonl"
step heads 420 python3 "$here/decode_shapes.py" --shapes heads --preset k4v4 --against bf16 \
    --out "$out/gpu_decode_heads.jsonl"
step ragged_decode 300 python3 "$here/decode_shapes.py" --shapes lengths --preset k4v4 --preset k2v2 \
    --out "$out/gpu_decode_ragged.jsonl"
step seal 120 python3 "$here/seal.py"
step prefill 120 python3 "$here/prefill_kernels.py" extend --out "$out/gpu_extend.jsonl"
step export 300 python3 "$here/export_gpu.py" --folder "$out/packages" --out "$out/export_gpu.jsonl"
step mla 120 python3 "$here/mla_decode.py" "$out/mla_decode.jsonl"
