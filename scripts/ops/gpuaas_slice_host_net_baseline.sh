#!/bin/sh
# Network baseline repair of this slice host: bridge, NAT, forwarding, dnsmasq, boot service.
# Settings: --help. The bootstrap program with `network` as its first argument does the same.
exec sh "$(dirname "$0")/gpuaas_slice_host_deploy_bootstrap.sh" network "$@"
