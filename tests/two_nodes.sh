#!/usr/bin/env bash
# Two nodes as two network namespaces, joined by a veth pair, whose hosts' names are 127.0.1.1 in /etc/hosts, as Debian
# and Ubuntu set them: two_nodes.sh PYTHON FOLDER [NAME=VALUE]. What node N prints goes to FOLDER/N.txt.
set -euo pipefail
export python=$1 folder=$2 setting=${3:-NOTHING=} script=$PWD/tests/two_nodes.py
printf '127.0.0.1 localhost\n127.0.1.1 node0 node1\n' >"$folder/hosts"
node() {  # NUMBER: in its namespace
  hostname "node$1"
  mount --bind "$folder/hosts" /etc/hosts
  ip link set lo up
  ip address add "10.9.0.$(($1 + 1))/24" dev eth0
  ip link set eth0 up
  exec env "$setting" timeout 60 "$python" -m torch.distributed.run --nnodes 2 --node-rank "$1" --nproc-per-node 1 \
    --master-addr 10.9.0.1 --master-port 29511 "$script" >"$folder/$1.txt" 2>&1
}
export -f node
unshare -n -m -u bash -c '
  unshare -n -m -u sleep 200 & other=$!
  until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
  ip link add eth0 type veth peer name eth0 netns $other
  nsenter -t $other -n -m -u bash -c "node 1" & second=$!
  node 0 & first=$!
  wait -n && wait -n || kill $first $second
  kill $other' 2>/dev/null
