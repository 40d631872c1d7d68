#!/bin/sh
# Cloud-init user data of a machine that MAAS installs: fetch the enrolment script and run it.
# A token lives for minutes and an installation takes longer, so this script has a ticket, which
# is accepted once and from the address of this machine only.
set -eu
umask 077
# @values@
pause=${GPUAAS_ENROL_PAUSE:-3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() {
  logger -t gpuaas-enrol -- "$*" || :
  echo "gpuaas-enrol: $*"
}

die() {
  say "$*"
  exit 1
}

# A pinned CA must be the only CA: curl would otherwise accept the machine's CAs as well.
set -- --proto "$protocols"
if [ -n "$ca" ]; then
  printf '%s' "$ca" > "$work/ca.pem"
  mkdir "$work/no-cas"
  set -- --proto =https --cacert "$work/ca.pem" --capath "$work/no-cas"
fi
[ -z "$api_at" ] || set -- "$@" --resolve "$api_at"
tries=0
while :; do
  failed=0
  # The ticket goes through a pipe only: other users can read arguments.
  http=$(printf '{"ticket": "%s"}' "$token" | curl --silent --show-error --connect-timeout 10 \
    --max-time 60 "$@" --header 'Content-Type: application/json' --data @- \
    --output "$work/enrol.sh" --write-out '%{http_code}' \
    "$api_url/api/v1/nodes/$node_id/userdata" 2> "$work/curl") || failed=$?
  # A service that starts or ends, or a network that comes up. A ticket that was used is refused by
  # 401. curl: 6, 7 no connection, 28 no answer in time, 35, 52, 55, 56 a connection that ended.
  case $failed/$http in
    0/200) break ;;
    0/50[0-9] | 0/408 | 0/425 | 0/429 | [67]/* | 28/* | 35/* | 5[256]/*) ;;
    0/*) die "no enrolment script: HTTP $http" ;;
    *) die "no enrolment script: $(tr -cd '[:print:]' < "$work/curl" | cut -c1-200)" ;;
  esac
  tries=$((tries + 1))
  # Ten minutes for a service that is upgraded: nobody asks for this machine's enrolment again.
  [ "$tries" -lt 200 ] || die "no enrolment script from $api_name"
  sleep "$pause"
done
# An error page, or an answer that was cut off, is no script.
head -n 1 "$work/enrol.sh" | grep -qx '#!/bin/sh' || die "the answer is no script for $login_user"
sh "$work/enrol.sh"
