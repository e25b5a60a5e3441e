#!/bin/bash
# Exits 0 when the server on this machine says that it is ready. The image has no HTTP client, hence bash's own sockets,
# which speak no TLS: with certificates set, K3SERVE_PROBE_PORT must be set too.
set -u
trap '' PIPE  # a server that hangs up is not ready, no signal
port=${K3SERVE_PROBE_PORT:-${K3SERVE_PORT:-8000}}
[ "$port" = off ] && exit 0
exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
printf 'GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
IFS=' ' read -r -t 4 _ status _ <&3
[ "${status:-}" = 200 ]
