#!/usr/bin/env bash
# The Hopper backend on a machine with as many H100s or H200s as ranks, in one go of at most ten minutes: selftest, the
# layer's times at every size and four routings beside the NCCL baseline, and a short AgentX run against the service.
# Each part has a limit of its own and goes on without the others; tables and what failed come at the end, also when it
# is interrupted. The folder that is left (relative to where you are) has a log a part, bench.json and skew.json, their
# tables as Markdown, and AgentX's report.
#
#   tools/run_ep8.sh [--ranks 8] [--out FOLDER] [--short] [--parts "compile selftest bench skew agentx"]
set -u
all="compile selftest bench skew agentx"
ranks=8 out= short= parts=$all
usage() {
  echo "$1; usage: $0 [--ranks N] [--out FOLDER] [--short] [--parts \"$all\"]" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case $1 in
    --short) short=1; shift; continue ;;
    --ranks | --out | --parts) [ -n "${2-}" ] || usage "$1 must have a value, got none" ;;
    *) usage "option must be a known one, got $1" ;;
  esac
  case $1 in
    --ranks) ranks=$2 ;;
    --out) out=$2 ;;
    --parts) parts=$2 ;;
  esac
  shift 2
done
case $ranks in 1 | 2 | 4 | 8) ;; *) usage "--ranks must be 1, 2, 4 or 8, got $ranks" ;; esac
for name in $parts; do
  case " $all " in *" $name "*) ;; *) usage "--parts must be of $all, got $name" ;; esac
done
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
out=${out:-$here/out/ep8}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$here" || exit 1
# Of an earlier run; nothing else that may lie there.
for name in compile compile-service selftest bench skew agentx; do rm -f "$out/$name".{log,json,md}; done
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Nothing here uses NVLink multicast.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
hopper=megamoe.backends.hopper
timeout -k 5 60 "$python" -m $hopper || exit 1 # no GPU, another Triton: one sentence says so
failed= running= stopped=

limited() { # seconds, command...: ends with it, also when this script is interrupted. Its own group: nothing stays behind
  timeout -k 5 "$@" &
  running=$!
  wait $running
  local status=$?
  [ -z "$stopped" ] || { wait $running; status=$stopped; }
  running=
  return $status
}
stop() { # exit status
  stopped=$1
  [ -z "$running" ] || kill -TERM "$running"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP

part() { # name, seconds, command...: run with a limit, keep its output, say how it went
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  case " $parts " in *" ${name%-*} "*) ;; *) return ;; esac
  [ -z "$stopped" ] || return
  limited "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  [ $status = 0 ] || failed="$failed $name($status)"
  echo "== $name: exit status $status after $((SECONDS - began)) s"
}

sizes="1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192"
skewed="1 16 64 256 1024 4096"
[ -z "$short" ] || { sizes="1 16 256 2048"; skewed="16"; }
# What the AgentX part starts, and what is compiled for it.
export MEGAMOE_BACKEND=hopper MEGAMOE_NUM_RANKS=$ranks

part compile 100 "$python" -m $hopper.compile_ahead --for selftest bench --ranks "$ranks"
part compile-service 45 "$python" -m service.cli compile
part selftest 100 "$python" -m $hopper.selftest --ranks "$ranks" --shapes hopper-selftest --row-formats bf16 --soak 50
[ ! -f "$out/selftest.log" ] || grep -E "^FAIL|passed" "$out/selftest.log"
part bench 140 "$python" -m $hopper.bench --ranks "$ranks" --tokens $sizes --json "$out/bench.json"
part skew 90 "$python" -m $hopper.bench --ranks "$ranks" --tokens $skewed --distributions hot60 zipf one_rank \
  --json "$out/skew.json"
left=$((560 - SECONDS))
part agentx $((left > 60 ? left : 60)) "$python" -m service.cli demo --launcher local --duration 15 --out "$out/agentx"
[ ! -f "$out/agentx.log" ] || tail -n 25 "$out/agentx.log"
for run in bench skew; do
  [ -s "$out/$run.json" ] || continue
  timeout -k 5 15 "$python" -m $hopper.bench.tables "$out/$run.json" > "$out/$run.md" || failed="$failed tables-$run($?)"
  cat "$out/$run.md"
done
[ -z "$stopped" ] || echo "== interrupted"
echo "== done after $SECONDS s; failed:${failed:- nothing}"
[ -z "$stopped" ] || exit "$stopped"
[ -z "$failed" ]
