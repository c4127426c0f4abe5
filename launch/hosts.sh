#!/usr/bin/env bash
# One extraction on many hosts, over ssh. They share it through the store, so hosts may come, go and differ:
#
#   launch/hosts.sh start  HOSTFILE +data=mix914k store=s3    the same command on every host, by its launch/node.sh
#   launch/hosts.sh status HOSTFILE                           what runs there, and the last line it wrote
#   launch/hosts.sh stop   HOSTFILE                           SIGTERM: shards in hand are finished or dropped
#
# HOSTFILE: a line is an ssh destination; what follows it and lines with '#' are ignored (launch/hostfile.example is one).
# A host needs this checkout in $HOSTS_DIR (default: the path it has here), the same answers under work_dir, and its own
# credentials: nothing secret is sent. Sent are DFLASH_STORE, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and HF_HOME.
# A run there outlives the connection; it writes runs/node-<host>.log.
set -euo pipefail

usage() {
  sed -n '4,6s/^# *//p' "$0" >&2
  exit 2
}

on_host() { # action, folder, NAME=value..., --, overrides: this function is sent there, and runs there
  local action=$1 settings=() log pid
  cd "$2" || return
  shift 2
  while [ "$1" != -- ]; do
    settings+=("$1")
    shift
  done
  shift
  mkdir -p runs
  log=runs/node-$(hostname).log # hosts that share a file system have files of their own
  pid=${log%.log}.pid
  if [ -f "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then
    case $action in
      start) echo "runs already, pid $(cat "$pid")" ;;
      status) echo "runs, pid $(cat "$pid"): $(tail -n 1 "$log")" ;;
      stop) kill -TERM "$(cat "$pid")" && echo "told to stop, pid $(cat "$pid")" ;;
    esac
  elif [ "$action" = start ]; then
    [ -x launch/node.sh ] || return
    env "${settings[@]}" nohup launch/node.sh "$@" >>"$log" 2>&1 </dev/null &
    echo $! >"$pid"
    echo "started, pid $!, log $log"
  else
    echo "does not run; last: $(tail -n 1 "$log" 2>/dev/null || true)"
  fi
}

[ $# -ge 2 ] || usage
action=$1 hostfile=$2 folder=${HOSTS_DIR:-$(cd "$(dirname "$0")/.." && pwd)}
shift 2
case $action in start | status | stop) ;; *) usage ;; esac
[ -r "$hostfile" ] || {
  printf 'hosts: %s cannot be read\n  fix:  a file with one ssh destination a line\n' "$hostfile" >&2
  exit 2
}

settings=()
for name in DFLASH_STORE AWS_ENDPOINT_URL AWS_DEFAULT_REGION HF_HOME; do
  [ -z "${!name:-}" ] || settings+=("$name=${!name}")
done
failed=()
while read -r host _ <&3; do
  case $host in '' | '#'*) continue ;; esac
  printf '%s: ' "$host"
  ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" "bash -s --$(printf ' %q' "$action" "$folder" "${settings[@]}" -- "$@")" \
    <<<"$(declare -f on_host); on_host \"\$@\"" || failed+=("$host")
done 3<"$hostfile"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'hosts: %s failed on: %s\n  fix:  ssh there by key, and this checkout in %s (HOSTS_DIR)\n' \
    "$action" "${failed[*]}" "$folder" >&2
  exit 1
fi
