#!/usr/bin/env bash
# Two hosts on one machine: network namespaces with a cable between them, torchrun in each, as on a cluster.
#
#   sudo recipes/two_hosts.sh --pipeline.stages 2 --pipeline.replicas 2 --pipeline.microbatches 2 --train.steps 20 \
#        --run.name two-hosts
#
# Two processes a host, so stages x replicas must be four. Everything after the script's name goes to `slipstream train`.
# The two share a file system, which real hosts do not: shared memory is switched off, so that messages take the cable.
set -euo pipefail

torchrun=${TORCHRUN:-$(dirname "$0")/../.venv/bin/torchrun}
port=29511

take_down() {
    ip netns del slipstream0 2>/dev/null || true
    ip netns del slipstream1 2>/dev/null || true
}
trap take_down EXIT
take_down
ip netns add slipstream0
ip netns add slipstream1
ip link add cable0 netns slipstream0 type veth peer name cable1 netns slipstream1
for host in 0 1; do
    ip -n slipstream$host addr add 10.77.0.$((host + 1))/24 dev cable$host
    ip -n slipstream$host link set cable$host up
    ip -n slipstream$host link set lo up
done

start() {
    GLOO_SOCKET_IFNAME=cable$1 ip netns exec slipstream$1 "$torchrun" --nnodes 2 --node-rank "$1" --nproc-per-node 2 \
        --master-addr 10.77.0.1 --master-port $port -m slipstream train --pipeline.no-shared-memory "${@:2}"
}
start 1 "$@" >/dev/null &
start 0 "$@"
wait
