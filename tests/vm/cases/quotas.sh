# emptyDir volumes of pods with user namespaces, measured by project quotas: the ignored test of pod-sync-direct-volumes on real file systems.

run() {
    for fs in ext4 xfs; do
        image=/var/tmp/quota-$fs.img dir=/mnt/quota-$fs
        mkdir -p $dir && rm -f $image && truncate -s 512M $image
        case $fs in
            ext4) mkfs.ext4 -q -F -O quota,project -E quotatype=prjquota $image ;;
            xfs) mkfs.xfs -q -f $image ;;
        esac && mount -o loop,prjquota $image $dir
        env QUINTLET_QUOTA_DIR=$dir $here/bin/quota-test --ignored --exact \
            quotas::tests::a_real_file_system_counts_files_that_were_deleted_and_are_open > /tmp/quota 2>&1
        cat /tmp/quota
        # A name that no test has is no failure of the program.
        check "project quotas of $fs count a deleted file that is open" "$(stat -f -c %T $dir)" grep -q 'ok. 1 passed' /tmp/quota
        umount $dir
        rm -f $image
    done
}
