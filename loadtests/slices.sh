#!/bin/sh
# Real traces against a fleet of this machine, scaled down, or through the simulator, at full size:
#
#   loadtests/slices.sh live|simulated DATA OUT [azure-code azure-conv arena servegen]
#
# DATA is a folder of traces as `loraplex trace convert` reads them. Each slice leaves, in OUT,
# NAME-live.json and .html, or NAME-simulated.json and .html. The environment's PYTHON runs it, and
# SIMULATED_S is how much of a trace is simulated (an hour takes some minutes).
set -eu
how=$1 data=$2 out=$3
shift 3
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
mkdir -p "$out"

# One replica is an H200 with Llama-3.1-8B in bfloat16: steps as `loraplex bench engine` measured
# them (an earlier results/h200-engine.json; today's has 0.031 ms a prompt token), 84 MB an adapter, copied in 4 ms and read from a disk in 150 ms.
h200="--price step_s=0.0047 --price row_s=0.000024 --price prompt_token_s=0.000021
  --price adapter_s=0.000026 --price host_load_s=0.0042 --price disk_load_s=0.15
  --price pages=50000"

slice() { # NAME FILE START SECONDS PROMPT_SCALE OUTPUT_SCALE TITLE
  trace=$out/$1.jsonl
  case $how in
  live)
    "$python" -m loadtests trace convert "$data/$2" --start-s "$3" --duration-s "$4" \
      --prompt-scale "$5" --output-scale "$6" --tokens-max 1024 -o "$trace"
    "$python" -m loadtests.loadtest "$trace" -o "$out/$1" --title "$7, live, scaled down" \
      --note "$2: seconds $3 to $(($3 + $4)) at their own pace, prompt tokens times $5 and output \
tokens times $6 (at most 1024), small random base on this machine's processor."
    mv "$out/$1/report.html" "$out/$1-live.html"
    mv "$out/$1/figures.json" "$out/$1-live.json"
    rm -r "$out/$1"
    ;;
  simulated)
    "$python" -m loadtests trace convert "$data/$2" --duration-s "${SIMULATED_S:-3600}" -o "$trace"
    # shellcheck disable=SC2086
    "$python" -m loadtests simulate "$trace" --policy loraplex --replicas 2 --slots 16 --host 64 \
      --capacity 64 $h200 -o "$out/$1-simulated.json" --html "$out/$1-simulated.html"
    ;;
  *)
    echo "live or simulated, not $how" >&2
    exit 2
    ;;
  esac
  rm "$trace"
}

for name in ${*:-azure-code azure-conv arena servegen}; do
  case $name in
  azure-code)
    slice azure-code replay_azure_code_64adapters_synthetic.csv.gz 600 100 0.0625 0.25 \
      "Azure 2023, code" ;;
  azure-conv)
    slice azure-conv replay_azure_conv_128adapters_synthetic.csv.gz 600 100 0.0625 0.0625 \
      "Azure 2023, conversations" ;;
  arena)
    slice arena arena_vtc_27adapters.csv.gz 0 100 0.25 0.25 "Chatbot Arena" ;;
  servegen)
    slice servegen servegen_sample_m_large_1h_6rps.csv.gz 600 100 0.0625 0.0625 \
      "ServeGen, m-large" ;;
  *)
    echo "no slice $name" >&2
    exit 2
    ;;
  esac
done
