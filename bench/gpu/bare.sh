#!/usr/bin/env bash
# Runs the GPU bench on a bare machine: assembles the travelling folder (make bench-gpu-parts) that was carried with the
# sources, runs the sections, and keeps in OUT, however the run ends, three files: all rows, what was printed, and the
# ends of the engines' logs.
#
#   bash bench/gpu/bare.sh OUT [options of bench/gpu, such as --minutes 9 --sections smoke tests]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1
shift
rows=$(mktemp -d)
site=$(mktemp -d)
python=${PYTHON:-python3}

keep() {
	[[ ! -e $rows/rows.jsonl ]] || cp "$rows/rows.jsonl" "$out/rows.jsonl"
	tail -n 60 "$rows"/*.log > "$out/logs.txt" 2> /dev/null || true
}

"$python" bench/gpu/unpacking.py --into "$site" --compile .pagemill/gpu-parts/*.tar.*
export PYTHONPATH="$site/site" PYTHONUNBUFFERED=1
trap keep EXIT
(while sleep 2; do keep; done) &
copying=$!
status=0
"$python" bench/gpu --out "$rows" "$@" > "$out/run.txt" 2>&1 || status=$?
kill "$copying"
grep -E '^==|^[a-z0-9.-]+: ' "$out/run.txt" | grep -v '^smoke: tiny' | cut -c1-300 | tail -n 120
exit "$status"
