#!/usr/bin/env bash
# The Hopper backend on a machine with as many H100s or H200s as ranks, in one go of at most ten minutes: selftest, the
# layer's times at every size and four routings beside the NCCL baseline, and a short AgentX run against the service.
# Each part has a limit of its own and goes on without the others; tables and what failed come at the end. The folder
# that is left has a log a part, bench.json and skew.json, their tables as Markdown, and AgentX's report.
#
#   tools/run_ep8.sh [--ranks 8] [--out out/ep8] [--short] [--parts "compile selftest bench skew agentx"]
set -u
ranks=8 out=out/ep8 short= parts="compile selftest bench skew agentx"
while [ $# -gt 0 ]; do
  case $1 in
    --ranks) ranks=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --short) short=1; shift ;;
    --parts) parts=$2; shift 2 ;;
    *) echo "usage: $0 [--ranks N] [--out FOLDER] [--short] [--parts NAMES]" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out" || exit 1
rm -f "$out"/*.json "$out"/*.md "$out"/*.log
out=$(cd "$out" && pwd) || exit 1
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Nothing here uses NVLink multicast.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
hopper="$python -m megamoe.backends.hopper"
$hopper || exit 1 # no GPU, another Triton: one sentence says so
failed=

part() { # name, seconds, command...: run with a limit, keep its output, say how it went
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  case " $parts " in *" ${name%-*} "*) ;; *) return ;; esac
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  [ $status = 0 ] || failed="$failed $name($status)"
  echo "== $name: exit status $status after $((SECONDS - began)) s"
}

sizes="1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192"
skewed="1 16 64 256 1024 4096"
[ -z "$short" ] || { sizes="1 16 256 2048"; skewed="16"; }
# What the AgentX part starts, and what is compiled for it.
export MEGAMOE_BACKEND=hopper MEGAMOE_NUM_RANKS=$ranks

part compile 100 $hopper.compile_ahead --for selftest bench --ranks "$ranks"
part compile-service 45 "$python" -m service.cli compile
part selftest 100 $hopper.selftest --ranks "$ranks" --shapes hopper-selftest --row-formats bf16 --soak 50
[ ! -f "$out/selftest.log" ] || grep -E "^FAIL|passed" "$out/selftest.log"
part bench 140 $hopper.bench --ranks "$ranks" --tokens $sizes --json "$out/bench.json"
part skew 90 $hopper.bench --ranks "$ranks" --tokens $skewed --distributions hot60 zipf one_rank --json "$out/skew.json"
left=$((580 - SECONDS))
part agentx $((left > 60 ? left : 60)) "$python" -m service.cli demo --launcher local --duration 15 --out "$out/agentx"
[ ! -f "$out/agentx.log" ] || tail -n 25 "$out/agentx.log"
for run in bench skew; do
  [ ! -s "$out/$run.json" ] || $hopper.bench.tables "$out/$run.json" | tee "$out/$run.md"
done
echo "== done after $SECONDS s; failed:${failed:- nothing}"
[ -z "$failed" ]
