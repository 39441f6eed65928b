#!/usr/bin/env bash
# Foreign OpenAI clients against a running gateway: chat and stream, each in an environment of its own.
#
#   loadtests/sdk_smoke.sh URL KEY MODEL [CLIENT…]      CLIENT: langchain litellm llm (all by default)
#
# The environments are kept in $SDK_SMOKE_CACHE (about 600 MB, minutes the first time) and used again.
# Exit status: how many clients failed.
set -uo pipefail

if (($# < 3)); then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 64
fi
export SMOKE_URL=${1%/}/v1 SMOKE_KEY=$2 SMOKE_MODEL=$3
shift 3
clients=("$@")
((${#clients[@]})) || clients=(langchain litellm llm)

python=${PY:-python3.11}
cache=${SDK_SMOKE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/loraplex/sdk-smoke}

declare -A package=(
    [langchain]='langchain-openai>=1,<2'
    [litellm]='litellm>=1.80,<2'
    [llm]='llm>=0.27,<1'
)

# Each program exits non-zero unless both a whole and a streamed answer have text.
declare -A program
program[langchain]='
import os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=os.environ["SMOKE_URL"], api_key=os.environ["SMOKE_KEY"],
                  model=os.environ["SMOKE_MODEL"], max_tokens=8, timeout=60, stream_usage=True)
whole = chat.invoke("Say hi.")
assert whole.content and whole.usage_metadata["total_tokens"] > 0, whole
assert whole.response_metadata["model_name"] == os.environ["SMOKE_MODEL"], whole
parts = list(chat.stream("Say hi."))
assert len(parts) > 1 and "".join(part.content for part in parts), parts
assert any(part.usage_metadata for part in parts), parts
'
program[litellm]='
import os
import litellm
litellm.suppress_debug_info = True
asked = dict(model="openai/" + os.environ["SMOKE_MODEL"], api_base=os.environ["SMOKE_URL"],
             api_key=os.environ["SMOKE_KEY"], max_tokens=8, timeout=60,
             messages=[{"role": "user", "content": "Say hi."}])
whole = litellm.completion(**asked)
assert whole.choices[0].message.content and whole.usage.total_tokens > 0, whole
parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
assert len(parts) > 1 and "".join(p.choices[0].delta.content or "" for p in parts if p.choices), parts
try:
    litellm.completion(**{**asked, "model": "openai/no-such-model", "max_retries": 0})
    raise SystemExit("a model that is none was answered")
except litellm.NotFoundError:
    pass
'
program[llm]='
import json, os, pathlib, tempfile
home = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
name = os.environ["SMOKE_MODEL"]
entry = [{"model_id": "smoke", "model_name": name, "api_base": os.environ["SMOKE_URL"],
          "api_key_name": "smoke"}]
(home / "extra-openai-models.yaml").write_text(json.dumps(entry))
(home / "keys.json").write_text(json.dumps({"smoke": os.environ["SMOKE_KEY"]}))
import llm
model = llm.get_model("smoke")
whole = model.prompt("Say hi.", stream=False)
assert whole.text(), whole
parts = list(model.prompt("Say hi.", stream=True))
assert len(parts) > 1 and "".join(parts), parts
'

failed=0
for client in "${clients[@]}"; do
    if [[ -z ${package[$client]:-} ]]; then
        echo "unknown client $client; there are ${!package[*]}" >&2
        exit 64
    fi
    venv=$cache/$client
    if [[ ! -e $venv/.ready ]]; then
        echo "==> ${package[$client]} into $venv"
        "$python" -m venv "$venv" &&
            "$venv/bin/pip" install --quiet --disable-pip-version-check "${package[$client]}" &&
            touch "$venv/.ready" || { echo "FAILED  $client: not installed" && ((++failed)) && continue; }
    fi
    version=$("$venv/bin/pip" list --format freeze --disable-pip-version-check 2>/dev/null |
        grep -i "^${package[$client]%%>*}==")
    # LiteLLM would else fetch a price list; nobody here phones home.
    if LITELLM_LOCAL_MODEL_COST_MAP=True LANGSMITH_TRACING=false PYTHONWARNINGS=ignore \
        "$venv/bin/python" -c "${program[$client]}"; then
        echo "ok      $version: chat and stream"
    else
        echo "FAILED  $version"
        ((++failed))
    fi
done
exit "$failed"
