# shellcheck shell=bash
# What a machine is, asked before anything is downloaded. Sourced by the install scripts.

refuse() { # TEXT: the script ends, and says why and what to do
    echo "$1" >&2
    exit 2
}

at_least() { # WANTED IS: what is no number is less than any
    case $2 in [0-9]*) [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ] ;; *) false ;; esac
}

# tell_machine PYTHON: says driver, glibc and Python, and sets driver, cuda (the newest that the driver takes), glibc and version
tell_machine() {
    driver=none cuda=none
    if command -v nvidia-smi >/dev/null; then
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
        cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9][0-9.]*\).*/\1/p' | head -n 1) || cuda=
    fi
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) && glibc=${glibc#glibc } || glibc=none
    version=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
        refuse "$1: no Python that runs; install Python 3.12, or name yours: PYTHON=/path/to/python3 $0"
    echo "NVIDIA driver ${driver:-that does not answer}$([ "${cuda:-none}" = none ] || echo ", up to CUDA $cuda"), glibc $glibc, Python $version"
}

# want_driver: refuses a driver that does not take CUDA 13; 580.65 is the first that does
want_driver() {
    [ -n "$driver" ] || refuse "nvidia-smi is here and sees no GPU: mend the driver (is its kernel module loaded, has this container GPUs?)$1"
    if [ -n "$cuda" ]; then at_least 13.0 "$cuda"; else at_least 580.65 "$driver"; fi ||
        refuse "NVIDIA driver $driver is too old for CUDA 13, with which torch comes: install 580.65 or newer (on data centre GPUs the package cuda-compat-13-0 beside the old one will do)$1"
}

# want_compiler PYTHON: refuses a machine on which Triton cannot build its launchers
want_compiler() {
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null ||
        refuse "no C compiler, without which no kernel of Triton runs: apt-get install gcc (dnf install gcc)"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        refuse "Python's headers are missing, without which no kernel of Triton runs: apt-get install python${version%.*}-dev (dnf install python${version%.*}-devel)"
}
