#!/bin/sh
# Runs in the virtual machine of run.sh, as root and from systemd: sets the node up at the first boot, then runs the cases that run.sh
# names. A case is a file in cases/ with a function `run`. A case that reboots has a function `rebooted`, which the next boot calls.
set -u

here=/payload
# Kept across boots: "set-up", the number of boots, cases that are done, the case that reboots.
state=/var/lib/vm
mkdir -p $state
. $here/lib.sh

boots=$(($(cat $state/boots 2> /dev/null || echo 0) + 1))
echo $boots > $state/boots
# Each case reboots once at most, and the case power as often as the power is cut.
[ $boots -le $((5 + $(cat $here/kills))) ] || { row "boots" FAILED "$boots"; end; }

. $here/setup.sh
[ -e $state/set-up ] || set_up
[ -e $state/set-up ] || end
for case in $(cat $here/list); do
    ! grep -qx "$case" $state/done 2> /dev/null || continue
    echo "case|$case|$(cut -d . -f 1 /proc/uptime)" > $result
    . "$here/cases/$case.sh"
    if [ "$(cat $state/reboots 2> /dev/null)" = "$case" ]; then
        rm $state/reboots
        rebooted
    else
        run
    fi
    # The machine goes down, and this process with it.
    [ ! -e $state/reboots ] || exit 0
    echo "$case" >> $state/done
    tidy
done
end
