#!/usr/bin/env bash
# The Hopper backend on a machine with as many H100s or H200s as ranks, in one go of at most ten minutes: selftest, the
# layer's times at every size and four routings beside the NCCL baseline, and a short AgentX run against the service.
# Each part has a limit of its own and goes on without the others; what failed is listed at the end.
#
#   tools/run_ep8.sh [--ranks 8] [--out out/ep8] [--short]
set -u
ranks=8 out=out/ep8 short=
while [ $# -gt 0 ]; do
  case $1 in
    --ranks) ranks=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --short) short=1; shift ;;
    *) echo "usage: $0 [--ranks N] [--out FOLDER] [--short]" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Nothing here uses NVLink multicast.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
hopper="$python -m megamoe.backends.hopper"
failed=

part() { # name, seconds, command...: run with a limit, keep its output, say how it went
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  [ $status = 0 ] || failed="$failed $name($status)"
  echo "== $name: exit status $status after $((SECONDS - began)) s"
}

sizes="1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192"
skewed="16 256 4096"
[ -z "$short" ] || { sizes="1 16 256 2048"; skewed="16"; }

part compile 100 $hopper.compile_ahead --for selftest bench --ranks "$ranks" --devices "$ranks"
part selftest 100 $hopper.selftest --ranks "$ranks" --shapes hopper-selftest --row-formats bf16 --soak 50
grep -E "^FAIL|passed" "$out/selftest.log"
part bench 150 $hopper.bench --ranks "$ranks" --tokens $sizes --json "$out/bench.json"
cut -c1-150 "$out/bench.log"
part skew 90 $hopper.bench --ranks "$ranks" --tokens $skewed --distributions hot60 zipf one_rank --json "$out/skew.json"
cut -c1-150 "$out/skew.log"
part baseline 70 $hopper.baseline --ranks "$ranks" --tokens $sizes
grep grouped_mm "$out/baseline.log"
part agentx $((SECONDS < 520 ? 590 - SECONDS : 70)) env MEGAMOE_BACKEND=hopper MEGAMOE_NUM_RANKS="$ranks" \
  "$python" -m service.cli demo --launcher local --duration 15 --out "$out/agentx"
tail -n 25 "$out/agentx.log"
echo "== done after $SECONDS s; failed:${failed:- nothing}"
[ -z "$failed" ]
