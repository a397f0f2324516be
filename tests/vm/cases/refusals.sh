# No service was denied an operation that it needs, in any case before.

run() {
    for unit in $units; do
        complaints=$(journalctl --no-pager -o cat -u "quintlet-$unit" | grep -cE 'Operation not permitted|Permission denied|EPERM|EACCES')
        check "$unit was refused nothing" "$complaints lines" test "$complaints" = 0
    done
}
