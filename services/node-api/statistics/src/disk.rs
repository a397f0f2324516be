//! Disk usage: writable layers and logs of containers, volumes, and the ephemeral storage of a pod.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use quintlet_cri_api::v1;
use quintlet_kit::file_system::FileSystemUsage;
use quintlet_proto::podsync::v1 as wire;
use serde_json::{Value, json};

use super::cri_stats::{number, object, time};

/// Unit of `st_blocks`, independent of the file system.
const BLOCK: u64 = 512;

/// Directories of the runtime with the statistics of their file systems. pod-sync measures them: node-api may
/// not enter the directories.
pub(super) type RuntimeFiles = BTreeMap<String, wire::DiskUsage>;

/// Returns a file system of the runtime, as pod-sync reports it, or else as this process sees it.
pub(super) fn of_runtime(place: &str, reported: &RuntimeFiles, time: &str) -> Value {
    reported.get(place).map_or_else(
        || file_system(Path::new(place), time),
        |usage| {
            let mut out = cri_stats(usage);
            out["time"] = json!(time);
            out
        },
    )
}

fn cri_stats(usage: &wire::DiskUsage) -> Value {
    json!({
        "availableBytes": usage.available_bytes,
        "capacityBytes": usage.capacity_bytes,
        "usedBytes": usage.used_bytes,
        "inodesFree": usage.inodes_free,
        "inodes": usage.inodes,
        "inodesUsed": usage.inodes_used,
    })
}

/// Returns a file system of images or writable layers: the usage from the runtime, the capacity from the file
/// system.
pub(super) fn image_fs(fs: &v1::FilesystemUsage, reported: &RuntimeFiles) -> Value {
    let place = fs.fs_id.as_ref().map(|id| id.mountpoint.as_str()).unwrap_or_default();
    let value = |n: Option<v1::UInt64Value>| number(n).as_u64();
    within(&of_runtime(place, reported, ""), time(fs.timestamp), value(fs.used_bytes), value(fs.inodes_used))
}

/// Returns the file system of a path.
pub(super) fn file_system(path: &Path, time: &str) -> Value {
    let Some(usage) = FileSystemUsage::read(path) else { return json!({"time": time}) };
    json!({
        "time": time,
        "availableBytes": usage.available_bytes,
        "capacityBytes": usage.capacity_bytes,
        "usedBytes": usage.used_bytes,
        "inodesFree": usage.free_inodes,
        "inodes": usage.inodes,
        "inodesUsed": usage.inodes.saturating_sub(usage.free_inodes),
    })
}

/// Returns the usage of something in a file system together with the capacity. None if the usage is unknown.
fn within(fs: &Value, time: Value, used_bytes: Option<u64>, inodes_used: Option<u64>) -> Value {
    object([
        ("time", time),
        ("availableBytes", fs["availableBytes"].clone()),
        ("capacityBytes", fs["capacityBytes"].clone()),
        ("usedBytes", json!(used_bytes)),
        ("inodesFree", fs["inodesFree"].clone()),
        ("inodes", fs["inodes"].clone()),
        ("inodesUsed", json!(inodes_used)),
    ])
}

/// Returns the usage of a container's writable layer.
pub(super) fn writable(layer: Option<&v1::FilesystemUsage>, reported: &RuntimeFiles) -> Value {
    layer.map_or(Value::Null, |layer| image_fs(layer, reported))
}

/// Returns the usage of the files in a log directory, which lies in `fs`. Subdirectories do not count.
pub(super) fn logs(dir: &Path, fs: &Value, time: &str) -> Value {
    let Ok(entries) = std::fs::read_dir(dir) else { return Value::Null };
    let files: Vec<u64> = entries
        .flatten()
        .filter_map(|e| e.metadata().ok())
        .filter(|file| !file.is_dir())
        .map(|file| file.blocks().saturating_mul(BLOCK))
        .collect();
    // Without files, nothing is reported, not even zero.
    let (bytes, inodes) = (files.iter().copied().reduce(u64::saturating_add), files.len() as u64);
    within(fs, json!(time), bytes, bytes.map(|_| inodes))
}

/// Returns the usage of a volume.
pub(super) fn volume(volume: &wire::VolumeStorage) -> Value {
    let mut out = cri_stats(&volume.usage.unwrap_or_default());
    out["name"] = json!(volume.name);
    out["time"] = time(volume.measured_unix_ns);
    if let Some(claim) = &volume.claim {
        out["pvcRef"] = json!({"name": claim.name, "namespace": claim.namespace});
    }
    out
}

/// Returns the ephemeral storage of a pod in the node's file system `fs`: writable layers and logs of its
/// containers, its own logs, ephemeral volumes, and its hosts file
/// (`pkg/kubelet/stats: calcEphemeralStorage`), with its termination logs.
pub(super) fn ephemeral(
    fs: &Value,
    now: &str,
    containers: &[Value],
    pod_logs: &Value,
    storage: Option<&wire::PodStorage>,
) -> Value {
    // Logs of a container count once its layer is known.
    let layered = containers.iter().filter(|c| !c["rootfs"].is_null());
    let files: Vec<&Value> = layered.flat_map(|c| [&c["rootfs"], &c["logs"]]).chain([pod_logs]).collect();
    let volumes = storage.into_iter().flat_map(|s| &s.volumes).filter(|v| v.is_ephemeral);
    let own_files = storage.into_iter().flat_map(|s| [s.hosts.as_ref(), s.termination_logs.as_ref()]);
    let measured: Vec<&wire::DiskUsage> =
        volumes.filter_map(|v| v.usage.as_ref()).chain(own_files.flatten()).collect();
    let sum = |field: &str, amount: fn(&wire::DiskUsage) -> u64| {
        let reported = files.iter().filter_map(|f| f[field].as_u64());
        reported.chain(measured.iter().map(|u| amount(u))).reduce(u64::saturating_add)
    };
    let (bytes, inodes) = (sum("usedBytes", |u| u.used_bytes), sum("inodesUsed", |u| u.inodes_used));
    within(fs, json!(now), bytes, inodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_usage_counts_the_blocks_of_the_files_in_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let fs =
            json!({"availableBytes": 1, "capacityBytes": 2, "inodes": 3, "inodesFree": 4, "usedBytes": 5});
        assert_eq!(logs(&dir.path().join("none"), &fs, "now"), Value::Null);
        let empty = logs(dir.path(), &fs, "now");
        assert_eq!((&empty["usedBytes"], &empty["capacityBytes"]), (&Value::Null, &json!(2)));
        std::fs::write(dir.path().join("0.log"), vec![1; 10_000]).unwrap();
        std::fs::write(dir.path().join("0.log.1"), vec![1; 10_000]).unwrap();
        std::fs::create_dir(dir.path().join("main")).unwrap();
        let found = logs(dir.path(), &fs, "now");
        assert_eq!((&found["inodesUsed"], &found["time"]), (&json!(2), &json!("now")));
        assert!((20_000..200_000).contains(&found["usedBytes"].as_u64().unwrap()), "{found}");
    }

    #[test]
    fn the_capacity_of_a_runtime_file_system_comes_from_pod_sync_and_its_usage_from_the_runtime() {
        let usage = wire::DiskUsage {
            available_bytes: 30,
            capacity_bytes: 100,
            used_bytes: 70,
            inodes: 10,
            inodes_free: 4,
            inodes_used: 6,
        };
        let reported = RuntimeFiles::from([("/closed".to_owned(), usage)]);
        let at = |place: &str| v1::FilesystemUsage {
            timestamp: 1_000_000_000,
            fs_id: Some(v1::FilesystemIdentifier { mountpoint: place.to_owned() }),
            used_bytes: Some(v1::UInt64Value { value: 7 }),
            inodes_used: Some(v1::UInt64Value { value: 2 }),
        };
        let want = json!({"time": "1970-01-01T00:00:01Z", "availableBytes": 30, "capacityBytes": 100, "usedBytes": 7,
            "inodesFree": 4, "inodes": 10, "inodesUsed": 2});
        assert_eq!(image_fs(&at("/closed"), &reported), want);
        assert_eq!(writable(Some(&at("/closed")), &reported), want);
        assert_eq!(writable(None, &reported), Value::Null);
        let open = image_fs(&at("/"), &reported);
        assert!(open["capacityBytes"].as_u64() > Some(100), "an older pod-sync reports nothing: {open}");
        let unknown = image_fs(&at("/nowhere/at/all"), &reported);
        assert_eq!((&unknown["usedBytes"], &unknown["capacityBytes"]), (&json!(7), &Value::Null));
    }

    #[test]
    fn ephemeral_storage_is_the_sum_of_layers_logs_and_volumes_on_disk() {
        let used = |bytes, inodes| {
            Some(wire::DiskUsage { used_bytes: bytes, inodes_used: inodes, ..Default::default() })
        };
        let volume = |name: &str, is_ephemeral, bytes| wire::VolumeStorage {
            claim: None,
            name: name.into(),
            is_ephemeral,
            usage: used(bytes, 1),
            ..Default::default()
        };
        let storage = wire::PodStorage {
            volumes: vec![volume("disk", true, 100), volume("memory", false, 1 << 40)],
            hosts: used(8, 1),
            termination_logs: used(1_000_000, 1),
            ..Default::default()
        };
        let fs = json!({"capacityBytes": 7, "usedBytes": 6});
        let containers = [
            json!({"rootfs": {"usedBytes": 1000, "inodesUsed": 10}, "logs": {"usedBytes": 10_000, "inodesUsed": 2}}),
            json!({"logs": {"usedBytes": 1_u64 << 40}}),
        ];
        let pod_logs = json!({"usedBytes": 100_000, "inodesUsed": 1});
        let out = ephemeral(&fs, "now", &containers, &pod_logs, Some(&storage));
        assert_eq!(
            out,
            json!({"time": "now", "capacityBytes": 7, "usedBytes": 1_111_108, "inodesUsed": 16}),
            "neither memory nor what has no layer yet"
        );
        let nothing = ephemeral(&fs, "now", &[], &Value::Null, None);
        assert_eq!(nothing["usedBytes"], Value::Null, "nothing is known");
    }

    #[test]
    fn a_volume_of_a_claim_names_it() {
        let claim = wire::ClaimReference { namespace: "shop".into(), name: "data-db-0".into() };
        let storage =
            wire::VolumeStorage { name: "data".into(), claim: Some(claim), ..wire::VolumeStorage::default() };
        assert_eq!(volume(&storage)["pvcRef"], json!({"name": "data-db-0", "namespace": "shop"}));
        assert_eq!(volume(&wire::VolumeStorage::default()).get("pvcRef"), None);
    }
}
