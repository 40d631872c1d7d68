# What the lab's own guest does without, after finish.sh. Images of a site keep it: their tenants install packages,
# whose sources cloud-init writes by a template, and its last stage runs what a launch asks for.
# Tests do not need these units, and each costs a second of the boot.
systemctl -q mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service \
  systemd-networkd-wait-online.service cloud-init-hotplugd.socket cloud-final.service
# cloud-init does without these two, if it must. Their import took two fifths of the start of each of its stages, which
# is seconds of emulation.
mkdir /spare
mv /usr/lib/python3/dist-packages/jsonschema /usr/lib/python3/dist-packages/jinja2 /spare
python3 -c "import cloudinit.cmd.main" || mv /spare/* /usr/lib/python3/dist-packages
rm -r /spare
