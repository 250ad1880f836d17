#!/bin/sh
# A job that never runs twice at once. In a crontab it is one line:
#
#   15 3 * * *  dlock run --no-wait nightly -- /usr/local/bin/backup
#
# or, to run on one of many hosts, with DLOCK_URL=redis://... above it.
# This script shows what such a line does:
#
#   sh examples/04-cron-job.sh

nightly() { # NAME COMMAND
  dlock run --no-wait --owner "$1" nightly -- sh -c "$2"
  status=$?
  case $status in
    0) echo "$1: done" ;;
    75) echo "$1: skipped, the one before still runs" ;;
    69) echo "$1: the server of the lock cannot be used" ;;
    70) echo "$1: lost the lock, so the command was ended" ;;
    *) echo "$1: the command failed with status $status" ;;
  esac
}

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export tmp

nightly monday 'echo "monday: backup with token $DLOCK_TOKEN"; : >"$tmp/running"
  until [ -e "$tmp/enough" ]; do sleep 0.1; done' &
while [ ! -e "$tmp/running" ] && kill -0 $! 2>/dev/null; do sleep 0.1; done

dlock status nightly
nightly tuesday 'echo "tuesday: backup"'
: >"$tmp/enough"
wait
nightly wednesday 'echo "wednesday: the disk is full"; exit 3'
dlock status nightly
