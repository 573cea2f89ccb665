#!/usr/bin/env bash
# Tokens per second with the default of 8 rows and with the size that is found, as JSON in tests/results.
source "$(dirname "$0")/common.sh"
train default || fail "exit code $?"
manual=$(metric default tok_s)
train auto --auto_batch_size=True || fail "exit code $?"
size=$(found)
auto=$(metric auto tok_s)
file=$RESULTS/throughput_comparison.json
"$PYTHON" - "$file" "$size" "$manual" "$auto" "$DEPTH" "$SEQ" "$GPUS" <<'PY'
import json, sys
size, manual, auto, depth, seq, gpus = map(float, sys.argv[2:])
result = {"depth": int(depth), "max_seq_len": int(seq), "gpus": int(gpus), "default_size": 8, "found_size": int(size),
          "default_tok_s": manual, "found_tok_s": auto, "ratio": auto / manual}
open(sys.argv[1], "w").write(json.dumps(result, indent=2) + "\n")
print(json.dumps(result))
# A GPU must not be slower. On a shared CPU times vary more than sizes matter.
sys.exit(gpus > 0 and auto < 0.97 * manual)
PY
pass "$file"
