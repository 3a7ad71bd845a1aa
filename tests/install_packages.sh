#!/bin/sh
# Installs what some tests need beyond Python: iproute2 (cutting networks apart), a real Slurm, and a browser. Needs root
# and apt-get; where something is missing and cannot be installed, says so loudly and goes on: those tests are skipped.
# No service is started: the tests start daemons of their own, and end them.

there() {
    for command in "$@"; do command -v "$command" > /dev/null || return 1; done
}

loudly() {
    printf '\n!!! %s\n!!! %s\n\n' "$1" "$2" >&2
}

install_quietly() {
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" > "$log" 2>&1
}

ensure() { # what goes untested without, packages, commands
    untested=$1 packages=$2 commands=$3
    # shellcheck disable=SC2086  # lists of words
    there $commands && return
    if [ "$(id -u)" != 0 ]; then
        loudly "NOT TESTED: $untested." "This needs root (and the packages $packages)."
        return
    fi
    if ! there apt-get; then
        loudly "NOT TESTED: $untested." "There is no apt-get here: install $packages yourself, in your system's names."
        return
    fi
    log=$(mktemp) refused=
    if [ ! -e /usr/sbin/policy-rc.d ]; then # what Debian's packages ask before they start a service
        printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d && refused=1
    fi
    echo "Installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    install_quietly $packages || { apt-get update -qq > "$log" 2>&1 && install_quietly $packages; } ||
        { cat "$log" >&2 && loudly "NOT TESTED: $untested." "apt-get cannot install $packages; it said the above."; }
    if [ -n "$refused" ]; then rm -f /usr/sbin/policy-rc.d; fi
    rm -f "$log"
}

ensure "networks cut apart" iproute2 ip
ensure "preemption, requeue and time limits under a real Slurm" "slurm-wlm munge" "munged slurmctld slurmd sbatch setpriv"
ensure "the layout of the report in a browser" chromium chromium
