#!/usr/bin/env bash
# toolkit.sh VENV: makes of what pip brought into a virtual environment (nvcc, headers, libcudart) the CUDA_HOME that SGLang links kernels with,
# and compiles one as SGLang does at its first request. Says what is missing.
set -euo pipefail
# shellcheck source=scripts/machine.sh
. "${0%/*}/../machine.sh"
venv=${1:?usage: toolkit.sh VENV}
home=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia/cu13")')
[ -x "$home/bin/nvcc" ] || refuse "no nvcc in $home: $venv/bin/python -m pip install 'humming-kernels[cu13]==0.1.12', which brings it"
[ -x "$venv/bin/ninja" ] || refuse "no ninja in $venv/bin: $venv/bin/python -m pip install ninja"
# SGLang links with -L$CUDA_HOME/lib64 -lcudart, and -L$CUDA_HOME/lib64/stubs -lcuda; pip's packages have a lib with libcudart.so.13 in it
ln -sfn lib "$home/lib64"
ln -sf libcudart.so.13 "$home/lib/libcudart.so"
mkdir -p "$home/lib/stubs"
libcuda=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p | sed -n 's/.*libcuda\.so\.1 .*x86-64.* => //p; s/.*libcuda\.so\.1 .*AArch64.* => //p' | head -n 1)
[ -z "$libcuda" ] || ln -sf "$libcuda" "$home/lib/stubs/libcuda.so"
try=$(mktemp -d)
trap 'rm -r "$try"' EXIT
printf '#include <cuda_runtime.h>\n__global__ void one(float* x) { *x = 1.0f; }\nextern "C" int go(float* x) { one<<<1, 1>>>(x); return cudaGetLastError(); }\n' >"$try/one.cu"
"$home/bin/nvcc" -std=c++20 -Xcompiler -fPIC -c "$try/one.cu" -o "$try/one.o"
"${CXX:-c++}" -shared "$try/one.o" "-L$home/lib64" -lcudart -o "$try/one.so"
echo "compiled a kernel with $("$home/bin/nvcc" --version | sed -n 's/.*\(release [0-9.]*\).*/nvcc \1/p') and ${CXX:-c++}"
