#!/bin/sh
# Repair the network baseline of this slice host: bridge, NAT, forwarding, dnsmasq, boot service.
# Settings: --help. The bootstrap program with `network` as its first word does the same.
exec sh "$(dirname "$0")/gpuaas_slice_host_deploy_bootstrap.sh" network "$@"
