# An nfs PersistentVolume of a server on this machine.
. $here/cases/disks.sh

run() {
    mkdir -p /srv/nfs && chmod 0777 /srv/nfs
    # An export needs a file system that can be exported: the disk of the machine is ext4.
    echo '/srv/nfs 127.0.0.1(rw,no_root_squash,insecure,no_subtree_check)' > /etc/exports
    systemctl start nfs-server
    exportfs -ra
    claim nfs Filesystem '{"mountOptions": ["nfsvers=4.2"], "nfs": {"server": "127.0.0.1", "path": "/srv/nfs"}}'
    reads_again nfs nfs
    check "the server has the file" "" grep -qx kept /srv/nfs/file
    becomes 60 "nfs is unmounted" unmounted 127.0.0.1:/srv/nfs
    claim nfs-missing Filesystem '{"mountOptions": ["nfsvers=4.2"], "nfs": {"server": "127.0.0.1", "path": "/srv/missing"}}'
    pod nfs-missing "$(with_claim nfs-missing 'sleep 1000000')"
    becomes 300 "a missing export is FailedMount" has_event nfs-missing FailedMount
    # Before the server stops: a mount that has begun waits minutes for a server.
    delete_pod nfs-missing
    systemctl stop nfs-server
}
