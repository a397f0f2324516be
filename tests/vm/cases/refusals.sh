# No service was denied an operation that it needs, in any case before.

run() {
    for unit in $units; do
        lines=$(journalctl --no-pager -o cat -u "quintlet-$unit" | wc -l)
        complaints=$(journalctl --no-pager -o cat -u "quintlet-$unit" | grep -cE 'Operation not permitted|Permission denied|Function not implemented|EPERM|EACCES|ENOSYS')
        check "$unit was refused nothing" "$complaints of $lines lines" test "$lines" -gt 0 -a "$complaints" = 0
    done
}
