#!/usr/bin/env bash
# offline_kit.sh FOLDER [--python 3.12]: fills FOLDER with the wheels that a machine lacks which has no network, and a torch of its own beside
# transformers, pyarrow, aiohttp, typer, scipy, psutil, safetensors, tokenizers, jinja2, numpy and matplotlib. At most 60 MB: without duckdb, plotly,
# mlflow, datasets, botocore and reasoning-gym rlpipe runs, and says so where it needs one. FOLDER/install.sh installs them there.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-}
python=3.12
[ "${2:-}" != --python ] || python=${3:-}
if [ -z "$folder" ] || ! [[ $python =~ ^3\.1[1-4]$ ]]; then
    echo "usage: scripts/offline_kit.sh FOLDER [--python 3.12]   (3.11 to 3.14)" >&2
    exit 2
fi
mkdir -p "$folder"
if [ -n "$(find "$folder" -mindepth 1 ! -name '*.whl' ! -name install.sh -print -quit)" ]; then
    echo "offline_kit: $folder has other files in it; name an empty folder" >&2
    exit 2
fi
pip="${PIP_PYTHON:-$here/.venv/bin/python} -m pip --disable-pip-version-check -q"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# of the machine itself, with all that these need; torch's own first ones beside CUDA
printf '%s\n' sympy networkx fsspec filelock setuptools transformers==5.17.0 pyarrow aiohttp typer==0.20.0 scipy psutil safetensors tokenizers jinja2 numpy matplotlib pytest pytest-xdist hypothesis \
    >"$scratch/there.txt"
printf '%s\n' 'prefect>=3.8.8,<3.9' 'fastapi<0.151' 'sqlalchemy<2.1' 'pydantic>=2.12' 'obstore>=0.12' orjson httpcore starlette uvicorn tqdm \
    math-verify==0.9.0 pytest-asyncio >"$scratch/wanted.txt"
platforms=()
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
: >"$scratch/there.constraints"
cp "$here/constraints.txt" "$scratch/wanted.constraints"
for list in there wanted; do
    $pip install --dry-run --ignore-installed --only-binary=:all: --python-version "$python" --implementation cp "${platforms[@]}" \
        --target "$scratch/none" -c "$scratch/$list.constraints" --report "$scratch/$list.json" -r "$scratch/$list.txt" 2>"$scratch/pip.log" ||
        { tail -n 5 "$scratch/pip.log" >&2; exit 1; }
done
python3 - "$scratch" >"$scratch/lacking.txt" <<'PYTHON'
import json, sys

def packages(name):
    report = json.load(open(f"{sys.argv[1]}/{name}.json"))
    return {entry["metadata"]["name"].lower().replace("_", "-"): entry["metadata"]["version"] for entry in report["install"]}

there = packages("there")
print(*(f"{name}=={version}" for name, version in sorted(packages("wanted").items()) if name not in there), sep="\n")
PYTHON
$pip download --no-deps --only-binary=:all: --python-version "$python" --implementation cp "${platforms[@]}" -d "$folder" -r "$scratch/lacking.txt" \
    2>"$scratch/pip.log" || { tail -n 5 "$scratch/pip.log" >&2; exit 1; }
cat >"$folder/install.sh" <<'INSTALL'
#!/usr/bin/env bash
# install.sh TARGET: the wheels beside this file into TARGET, without a network; PYTHON is the interpreter that has torch (python3)
set -euo pipefail
target=${1:?usage: install.sh TARGET}
"${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$target" "$(dirname "$0")"/*.whl
echo "export PYTHONPATH=$target:\$PWD    # in a checkout of rlpipe; then: python3 scripts/gpu_smoke.py --first"
INSTALL
chmod +x "$folder/install.sh"
echo "$(find "$folder" -name '*.whl' | wc -l) wheels for Python $python, $(du -cm "$folder"/*.whl | tail -n 1 | cut -f 1) MB, in $folder; there: $folder/install.sh TARGET"
