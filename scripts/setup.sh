#!/bin/sh
# Makes .venv and installs what the project needs: Python packages as constraints.txt pins them, and two small
# programs of the system. Called by make; safe to run again.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

python_3_11() { # print the first Python that is new enough
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer on PATH; install one, or name it: make setup PYTHON=/path/to/python3.11"
    exit 1
}

need_debian() { # need_debian PACKAGE WHY: install it, or say how
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $1 ($2)"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"; } \
            >/dev/null || { say "apt-get could not install $1; install it by hand, then run make again"; exit 1; }
    else
        say "$1 is missing ($2); install it (Debian: apt-get install $1), then run make again"
        exit 1
    fi
}

python=$(python_3_11)
"$python" -c 'import venv, ensurepip' 2>/dev/null || need_debian "$(basename "$python" | sed 's/$/-venv/')" "Python's venv"
command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ] || need_debian mosquitto "the message broker of the tests and the demo"
command -v xxhsum >/dev/null || need_debian xxhash "xxhsum, with which the tests check checkpoints independently"
[ "$(id -u)" != 0 ] || [ -x /usr/sbin/nft ] || need_debian nftables "what tests cut networks with; without root they are skipped"

if [ ! -x .venv/bin/python ]; then
    say "making .venv with $python"
    "$python" -m venv .venv
fi
say "installing Python packages (a few minutes the first time)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --log .venv/set-up.log -c constraints.txt \
    -e '.[service,torch,dev]' || { say "pip failed; .venv/set-up.log ends with the reason"; exit 1; }
