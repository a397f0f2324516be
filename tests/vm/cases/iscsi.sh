# An iSCSI PersistentVolume of a target on this machine, with and without CHAP.
. $here/cases/disks.sh

target() {
    tgtadm --lld iscsi --op new --mode target --tid "$1" -T "$2"
    truncate -s 64M "/srv/$1.img"
    tgtadm --lld iscsi --op new --mode logicalunit --tid "$1" --lun 1 -b "/srv/$1.img"
    tgtadm --lld iscsi --op bind --mode target --tid "$1" -I ALL
}

no_session() {
    iscsiadm -m session 2>&1 | head -n 1
    ! iscsiadm -m session 2> /dev/null | grep -q "$1"
}

# The part of the controller manager: a volume that the Node has in use is attached.
controller() {
    while sleep 2; do
        in_use=$(request GET /api/v1/nodes/$node | jq -c '[.status.volumesInUse[]? | {name: ., devicePath: ""}]')
        request PATCH /api/v1/nodes/$node/status "{\"status\": {\"volumesAttached\": $in_use}}"
    done
}

run() {
    controller > /dev/null 2>&1 &
    controller=$!
    mkdir -p /srv
    # A step of the operator: pod-sync may load no modules.
    modprobe iscsi_tcp
    systemctl start tgt iscsid
    until_true 120 tgtadm --lld iscsi --op show --mode target
    plain=iqn.2026-01.test.quintlet:plain
    chap=iqn.2026-01.test.quintlet:chap
    target 1 $plain
    target 2 $chap
    tgtadm --lld iscsi --op new --mode account --user someone --password twelve-letters
    tgtadm --lld iscsi --op bind --mode account --tid 2 --user someone
    claim iscsi Filesystem "{\"iscsi\": {\"targetPortal\": \"127.0.0.1:3260\", \"iqn\": \"$plain\", \"lun\": 1, \"fsType\": \"ext4\"}}"
    reads_again iscsi iscsi
    becomes 120 "session is logged out" no_session $plain
    request POST /api/v1/namespaces/default/secrets '{"metadata": {"name": "chap"}, "type": "kubernetes.io/iscsi-chap", "stringData": {"node.session.auth.username": "someone", "node.session.auth.password": "twelve-letters"}}' > /dev/null
    claim chap Filesystem "{\"iscsi\": {\"targetPortal\": \"127.0.0.1:3260\", \"iqn\": \"$chap\", \"lun\": 1, \"fsType\": \"ext4\", \"chapAuthSession\": true, \"secretRef\": {\"name\": \"chap\", \"namespace\": \"default\"}}}"
    reads_again chap chap
    becomes 120 "session with CHAP is logged out" no_session $chap
    check "the password is in no log" "" sh -c "! journalctl --no-pager -o cat -u 'quintlet-*' | grep -q twelve-letters"
    systemctl stop tgt iscsid
    kill $controller
}
