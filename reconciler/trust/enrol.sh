#!/bin/sh
# Cloud-init user data: enrol this machine with its reconciler.
# Sends the public SSH host key with a single-use token and installs the certificate, so that no
# client has to trust an unknown key. Safe to repeat with a new token.
set -eu
umask 077
PATH=$PATH:/usr/sbin:/sbin
# @values@
etc=${GPUAAS_ENROL_ETC:-/etc}
run=${GPUAAS_ENROL_RUN:-/run}
log=${GPUAAS_ENROL_LOG:-/var/log}/gpuaas-slice-firmware.log
pause=${GPUAAS_ENROL_PAUSE:-3}
key=$etc/ssh/ssh_host_ed25519_key
certificate=$key-cert.pub
settings=$etc/ssh/sshd_config.d/60-gpuaas.conf
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

ensure_host_key() {
  [ -s "$key" ] || ssh-keygen -q -t ed25519 -N '' -f "$key"
  [ -s "$key.pub" ] || ssh-keygen -y -f "$key" > "$key.pub"
}

note_expired_certificate() {
  [ -s "$certificate" ] || return 0
  until=$(ssh-keygen -L -f "$certificate" | sed -n 's/.*Valid: from .* to //p')
  if [ -n "$until" ] && expr "$until" '<' "$(date +%Y-%m-%dT%H:%M:%S)" > /dev/null; then
    say "local certificate expired ($until)"
  fi
}

# The token goes through pipes only: other users can read arguments and environments.
body() {
  printf '%s' "$token" | python3 -c '
import json, pathlib, re, socket, subprocess, sys

def text(path):
    return pathlib.Path(path).read_text().strip()

# Most machines have no address on a fabric before bootstrap.
def fabric():
    show = ["ip", "-j", "-4", "address", "show"]
    try:
        links = json.loads(subprocess.run(show, capture_output=True, timeout=10).stdout or "[]")
        for link in links:
            for address in link.get("addr_info", []):
                if re.fullmatch("ibp[a-z0-9]{0,12}", link["ifname"]):
                    return link["ifname"], "{local}/{prefixlen}".format(**address)
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        pass
    return "", ""

interface, address = fabric()
print(json.dumps({
    "token": sys.stdin.read(),
    "node_id": sys.argv[1],
    "host_key": text(sys.argv[2]),
    "machine_id": text(sys.argv[3]),
    "boot_id": text("/proc/sys/kernel/random/boot_id"),
    "hostname": socket.gethostname(),
    "fabric_interface": interface,
    "fabric_address": address,
}))' "$node_id" "$key.pub" "$etc/machine-id"
}

# A pinned CA must be the only CA: curl would otherwise accept the machine's CAs as well.
pin() {
  [ -n "$ca" ] || return 0
  printf '%s' "$ca" > "$work/ca.pem"
  mkdir "$work/no-cas"
}

send() {
  tries=0
  # Plain http only to this machine itself, unless the site has accepted it.
  set -- --proto "$protocols"
  [ -z "$ca" ] || set -- --proto =https --cacert "$work/ca.pem" --capath "$work/no-cas"
  # For a DNS that does not resolve the name; bootstrap writes it into /etc/hosts.
  [ -z "$api_at" ] || set -- "$@" --resolve "$api_at"
  while :; do
    failed=0
    http=$(body | curl --silent --show-error --connect-timeout 10 --max-time 60 "$@" \
      --header 'Content-Type: application/json' --data @- --output "$work/answer" \
      --write-out '%{http_code}' "$api_url/api/v1/nodes/$node_id/enrol" 2> "$work/curl") || failed=$?
    case $failed in
      0) return 0 ;;
      6 | 7) ;; # no connection was made, so the token is still valid
      28) die "no route to host against $api_name: timed out" ;;
      *) die "enrolment failed: $(tr -cd '[:print:]' < "$work/curl" | cut -c1-200)" ;;
    esac
    tries=$((tries + 1))
    [ "$tries" -lt 5 ] || die "no route to host against $api_name: $(tr -cd '[:print:]' < "$work/curl" | cut -c1-200)"
    sleep "$pause"
  done
}

error_code() {
  python3 -c '
import json, re, sys
try:
    answer = json.load(open(sys.argv[1]))
except ValueError:
    answer = {}
for part in (answer, answer.get("error"), answer.get("detail")):
    code = part.get("code") if isinstance(part, dict) else None
    if isinstance(code, str) and re.fullmatch("[a-z0-9_]{1,64}", code):
        print(code)
        break' "$work/answer" 2> /dev/null || :
}

unpack() {
  python3 -c '
import json, pathlib, re, sys
answer, folder = json.load(open(sys.argv[1])), pathlib.Path(sys.argv[2])
certificate, authority = answer["certificate"].strip(), answer["user_ca"].strip()
word = "[A-Za-z0-9+/=@._-]+"
if not re.fullmatch("ssh-ed25519-cert-v01@openssh.com " + word + "( " + word + ")?", certificate):
    sys.exit("certificate")
if not re.fullmatch("ssh-ed25519 " + word + "( " + word + ")?", authority):
    sys.exit("user_ca")
names = answer["principals"]
if not names or not all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names):
    sys.exit("principals")
(folder / "certificate").write_text(certificate + "\n")
(folder / "user_ca").write_text(authority + "\n")
(folder / "principals").write_text("".join(name + "\n" for name in names))' \
    "$work/answer" "$work" 2> /dev/null || die "enrolment answer not understood"
  ssh-keygen -L -f "$work/certificate" > "$work/shown" || die "enrolment answer not understood"
  print=$(ssh-keygen -l -f "$key.pub" | cut -d' ' -f2)
  grep -qF "$print" "$work/shown" || die "certificate is for another host key"
  grep -qx "[[:space:]]*$node_id" "$work/shown" || die "certificate is for another node"
}

put() { # source target
  mkdir -p "$(dirname "$2")"
  cp "$1" "$2.new"
  chmod 0644 "$2.new"
  mv "$2.new" "$2"
}

install_trust() {
  put "$work/certificate" "$certificate"
  put "$work/user_ca" "$etc/ssh/gpuaas_user_ca.pub"
  put "$work/principals" "$etc/ssh/gpuaas_principals/$login_user"
  chmod 0755 "$etc/ssh/gpuaas_principals"
  cat > "$work/settings" << SETTINGS
# Written by the enrolment of $node_id.
HostCertificate $certificate
TrustedUserCAKeys $etc/ssh/gpuaas_user_ca.pub
AuthorizedPrincipalsFile $etc/ssh/gpuaas_principals/%u
SETTINGS
  [ ! -e "$settings" ] || cp "$settings" "$work/before"
  put "$work/settings" "$settings"
  mkdir -p "$run/sshd"
  if ! sshd -t 2> "$work/sshd"; then
    if [ -e "$work/before" ]; then put "$work/before" "$settings"; else rm "$settings"; fi
    die "sshd refuses its configuration: $(tr -cd '[:print:]' < "$work/sshd" | cut -c1-200)"
  fi
  # A configuration without the usual Include is valid and has no effect.
  sshd -T 2> /dev/null | grep -qix "trustedusercakeys $etc/ssh/gpuaas_user_ca.pub" ||
    die "sshd does not read $settings: Include /etc/ssh/sshd_config.d/*.conf is missing"
  systemctl try-reload-or-restart ssh
}

remember() {
  mkdir -p "$etc/gpuaas"
  chmod 0755 "$etc/gpuaas"
  cat > "$work/env" << ENV
GPUAAS_NODE_ID=$node_id
GPUAAS_API_URL=$api_url
GPUAAS_API_NAME=$api_name
ENV
  put "$work/env" "$etc/gpuaas/enrolment.env"
  chmod 0600 "$etc/gpuaas/enrolment.env"
}

# Once per installation: the report stays when the machine is enrolled again.
# A failure does not stop the enrolment; parity shows the findings.
check_firmware() {
  [ ! -e "$log" ] || return 0
  python3 -c '
import json, os, re, subprocess, sys
preflight = json.load(open(sys.argv[1])).get("preflight")
if not isinstance(preflight, dict):
    sys.exit(3)
names = {name: value for name, value in preflight["environment"].items()
         if re.fullmatch("GPUAAS_SLICE_[A-Z_]+", name)}
with open(sys.argv[2], "w") as script:
    script.write(preflight["script"])
with open(sys.argv[3], "w") as output:
    # No change of firmware, whatever the answer asks for. Installing RACADM beside the first
    # upgrade of the machine takes minutes, but less than the limit.
    subprocess.run(["sh", sys.argv[2]], env={**os.environ, **names, "GPUAAS_SLICE_APPLY_BIOS": "0"},
                   stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=1800)
' "$work/answer" "$work/preflight" "$work/firmware" 2> "$work/trouble" || {
    [ $? -eq 3 ] || say "firmware preflight did not end: $(tail -n 1 "$work/trouble" | tr -cd '[:print:]' | cut -c1-200)"
    return 0
  }
  # Put the report in place only when it is complete.
  if ! { mkdir -p "${log%/*}" && cp "$work/firmware" "$log.new" && mv "$log.new" "$log"; }; then
    say "firmware preflight not kept in $log"
    return 0
  fi
  say "firmware preflight: $(tail -n 1 "$log" | tr -cd '[:print:]' | cut -c1-200)"
}

ensure_host_key
note_expired_certificate
pin
send
case $http in
  200 | 201) ;;
  401) die "401 token_invalid" ;;
  *) die "enrolment refused: HTTP $http $(error_code)" ;;
esac
unpack
install_trust
remember
say "node certificate enrolled"
check_firmware
