use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_eviction::Resource;
use serde_json::json;

use super::*;

fn write(root: &Path, files: &[(&str, &str)]) {
    for (file, text) in files {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn paths(dir: &Path) -> Paths {
    let at = |name: &str| dir.join(name);
    for name in ["root", "logs", "cgroup", "proc"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    Paths {
        root_dir: at("root"),
        pod_logs_dir: at("logs"),
        cgroups: at("cgroup"),
        cgroup_root: "/".to_owned(),
        proc: at("proc"),
    }
}

const PROC: [(&str, &str); 4] = [
    ("proc/meminfo", "MemTotal:        1000 kB\nMemFree:          10 kB\n"),
    ("proc/sys/kernel/pid_max", "32768\n"),
    ("proc/sys/kernel/threads-max", "2000\n"),
    ("proc/loadavg", "0.00 0.01 0.05 2/300 12345\n"),
];
const V1: [(&str, &str); 6] = [
    ("cgroup/memory/memory.usage_in_bytes", "500000\n"),
    ("cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 100000\n"),
    ("cgroup/memory/kubepods/memory.usage_in_bytes", "300000\n"),
    ("cgroup/memory/kubepods/memory.limit_in_bytes", "800000\n"),
    ("cgroup/memory/kubepods/memory.stat", "total_inactive_file 50000\n"),
    ("cgroup/cpuacct/kubepods/cpuacct.usage", "1\n"),
];
const V2: [(&str, &str); 6] = [
    ("cgroup/cgroup.controllers", "cpu memory pids\n"),
    ("cgroup/memory.stat", "anon 200000\nfile 300000\ninactive_file 100000\n"),
    ("cgroup/kubepods/memory.current", "300000\n"),
    ("cgroup/kubepods/memory.max", "800000\n"),
    ("cgroup/kubepods/memory.stat", "inactive_file 50000\n"),
    ("cgroup/kubepods/cpu.stat", "usage_usec 1\n"),
];

#[test]
fn memory_and_process_ids_are_read_from_both_cgroup_versions() {
    for version in [V1, V2] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &PROC);
        write(dir.path(), &version);
        let paths = paths(dir.path());
        let now = Duration::from_secs(5);
        let seen = node(&paths, &RuntimeMounts::default(), now);
        let values = |signal: Signal| seen.get(&signal).map(|o| (o.available.value(), o.capacity.value()));
        assert_eq!(values(Signal::MemoryAvailable), Some((1_024_000 - 400_000, 1_024_000)));
        assert_eq!(values(Signal::AllocatableMemoryAvailable), Some((550_000, 800_000)));
        assert_eq!(values(Signal::PidAvailable), Some((1700, 2000)));
        assert!(values(Signal::NodeFsAvailable).is_some_and(|(free, all)| free > 0 && free < all));
        assert_eq!(values(Signal::ImageFsAvailable), None, "the runtime has not answered");
        let without_files: Vec<_> = memory_and_processes(&paths, now).into_keys().collect();
        let want = [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable, Signal::PidAvailable];
        assert_eq!(without_files, want);
        assert!(seen.values().all(|observation| observation.at == now));
    }
}

#[test]
fn what_cannot_be_read_is_no_observation() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths { root_dir: dir.path().join("nowhere"), ..paths(dir.path()) };
    let mounts = RuntimeMounts { images: Some(dir.path().join("gone")), containers: None };
    assert_eq!(node(&paths, &mounts, Duration::ZERO), Observations::new());
    write(dir.path(), &[("proc/meminfo", "MemTotal: many kB\n"), ("proc/loadavg", "0.00\n")]);
    assert_eq!(node(&paths, &mounts, Duration::ZERO), Observations::new());
}

#[test]
fn usage_above_the_capacity_is_no_observation() {
    for (version, usage, of_pods) in [
        (V1, "cgroup/memory/memory.usage_in_bytes", "cgroup/memory/kubepods/memory.usage_in_bytes"),
        (V2, "cgroup/memory.stat", "cgroup/kubepods/memory.current"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &PROC);
        write(dir.path(), &version);
        let all =
            if usage.ends_with("stat") { "anon 1024001\nfile 0\ninactive_file 0\n" } else { "1124001\n" };
        write(dir.path(), &[(usage, all), (of_pods, "850001\n"), ("proc/loadavg", "0 0 0 2/2001 1\n")]);
        let seen = node(&paths(dir.path()), &RuntimeMounts::default(), Duration::ZERO);
        for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable, Signal::PidAvailable] {
            assert_eq!(seen.get(&signal), None, "{signal}");
        }
        // Everything in use is plausible.
        let all =
            if usage.ends_with("stat") { "anon 1024000\nfile 0\ninactive_file 0\n" } else { "1124000\n" };
        write(dir.path(), &[(usage, all), (of_pods, "850000\n"), ("proc/loadavg", "0 0 0 2/2000 1\n")]);
        let seen = node(&paths(dir.path()), &RuntimeMounts::default(), Duration::ZERO);
        for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable, Signal::PidAvailable] {
            assert_eq!(seen.get(&signal).map(|o| o.available.value()), Some(0), "{signal}");
        }
    }
}

#[test]
fn writable_layers_are_measured_on_the_file_system_of_images_unless_they_have_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    // procfs has no blocks, and so no observation.
    let (disk, none) = (Some(dir.path().to_owned()), Some(PathBuf::from("/proc")));
    for (images, containers, want) in [
        (&disk, &None, [true, true]),
        (&disk, &disk, [true, true]),
        (&disk, &none, [true, false]),
        (&none, &disk, [false, true]),
        (&None, &None, [false, false]),
    ] {
        let mounts = RuntimeMounts { images: images.clone(), containers: containers.clone() };
        let seen = node(&paths, &mounts, Duration::ZERO);
        let signals = [Signal::ImageFsAvailable, Signal::ContainerFsAvailable];
        assert_eq!(signals.map(|signal| seen.contains_key(&signal)), want, "{mounts:?}");
    }
}

#[test]
fn the_layout_follows_from_the_devices_of_the_file_systems() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let (same, other) = (Some(dir.path().to_owned()), Some(PathBuf::from("/proc")));
    for (images, containers, want) in [
        (&same, &same, Some(Layout::Single)),
        (&same, &None, Some(Layout::Single)),
        (&other, &other, Some(Layout::SeparateImages)),
        (&other, &None, Some(Layout::SeparateImages)),
        (&other, &same, Some(Layout::Split)),
        (&None, &same, None),
        (&Some(dir.path().join("gone")), &same, None),
    ] {
        let mounts = RuntimeMounts { images: images.clone(), containers: containers.clone() };
        assert_eq!(layout(&paths, &mounts), want, "{mounts:?}");
    }
}

#[test]
fn a_pod_is_measured_by_its_cgroup_logs_layers_and_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u" },
        "spec": { "containers": [{ "name": "c" }], "volumes": [{ "name": "v", "emptyDir": {} }] },
    }))
    .unwrap();
    let uid = PodUid::parse("u").unwrap();
    let id = ContainerId::parse("abc").unwrap();
    let candidate = Candidate { uid: uid.clone(), pod: Arc::new(pod) };
    write(
        dir.path(),
        &[
            ("cgroup/cgroup.controllers", "cpu memory pids\n"),
            ("cgroup/kubepods/besteffort/podu/memory.current", "9000\n"),
            ("cgroup/kubepods/besteffort/podu/memory.stat", "inactive_file 1000\n"),
            ("cgroup/kubepods/besteffort/podu/cpu.stat", "usage_usec 1\n"),
            ("cgroup/kubepods/besteffort/podu/pids.current", "7\n"),
            ("cgroup/kubepods/besteffort/podu/abc/memory.current", "5000\n"),
            ("cgroup/kubepods/besteffort/podu/abc/memory.stat", "inactive_file 0\n"),
            ("cgroup/kubepods/besteffort/podu/abc/cpu.stat", "usage_usec 1\n"),
            ("logs/n_p_u/c/0.log", "a line of the log\n"),
        ],
    );
    let disk = |bytes| Some(wire::DiskUsage { used_bytes: bytes, inodes_used: 3, ..Default::default() });
    let volume = |name: &str, is_ephemeral, bytes| wire::VolumeStorage {
        name: name.to_owned(),
        is_ephemeral,
        usage: disk(bytes),
        ..Default::default()
    };
    let storage = wire::PodStorage {
        uid: "u".to_owned(),
        volumes: vec![volume("v", true, 100_000), volume("memory", false, 999_999)],
        hosts: disk(4096),
        termination_logs: disk(8192),
    };
    let layer = FileUsage { bytes: Some(1_000_000), inodes: Some(20) };
    let unmeasured = Candidate { uid: PodUid::parse("gone").unwrap(), ..candidate.clone() };
    let sources = PodSources {
        candidates: vec![candidate.clone(), unmeasured],
        runtime: [(uid.clone(), vec![("c".to_owned(), id.clone())])].into(),
        writable_layers: [(id, layer)].into(),
        volumes: vec![storage],
        layers_capacity: None,
        has_files: true,
    };
    let all = pods(&paths, &sources);
    let unstarted = &all[&PodUid::parse("gone").unwrap()];
    assert_eq!((unstarted.working_set, unstarted.processes), (Some(0), Some(0)), "no container is running");
    let usage = &all[&uid];
    assert_eq!((usage.working_set, usage.processes), (Some(8000), Some(7)));
    let container = &usage.containers[0];
    assert_eq!((container.working_set, container.writable_layer), (Some(5000), layer));
    let logs = container.logs.bytes.unwrap();
    assert!(logs >= 512, "{logs}");
    assert_eq!(container.logs.inodes, Some(1));
    assert_eq!(usage.ephemeral_storage, Some(1_000_000 + logs + 100_000 + 4096 + 8192));
    assert_eq!(usage.own_files, FileUsage { bytes: Some(4096 + 8192), inodes: Some(6) });
    let counted = pod_sync_eviction::usage::disk_usage(
        &candidate.pod,
        usage,
        Layout::Single.measured(Signal::NodeFsInodesFree),
        Resource::Inodes,
    );
    assert_eq!(counted, 20 + 1 + 3 + 6);

    let runtime = sources.runtime;
    let without =
        PodSources { candidates: vec![candidate], runtime, has_files: false, ..PodSources::default() };
    let usage = &pods(&paths, &without)[&uid];
    assert_eq!((usage.working_set, usage.processes), (Some(8000), Some(7)));
    assert_eq!(
        (usage.containers[0].working_set, usage.containers[0].logs),
        (Some(5000), FileUsage::default())
    );
    assert_eq!((usage.ephemeral_storage, usage.volumes.len()), (None, 0), "no limit of storage applies");
}

#[test]
fn a_pod_without_a_cgroup_of_its_own_is_measured_by_its_containers() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u" },
        "spec": { "containers": [{ "name": "a" }, { "name": "b" }] },
    }))
    .unwrap();
    let uid = PodUid::parse("u").unwrap();
    let ids = ["a1", "b2"].map(|id| ContainerId::parse(id).unwrap());
    write(
        dir.path(),
        &[
            ("cgroup/cgroup.controllers", "cpu memory pids\n"),
            ("cgroup/a1/memory.current", "5000\n"),
            ("cgroup/a1/memory.stat", "inactive_file 1000\n"),
            ("cgroup/a1/pids.current", "3\n"),
            ("cgroup/b2/memory.current", "600\n"),
            ("cgroup/b2/memory.stat", "inactive_file 0\n"),
            ("cgroup/b2/pids.current", "4\n"),
            ("proc/10/cgroup", "0::/a1\n"),
            ("proc/20/cgroup", "0::/b2\n"),
        ],
    );
    let running = ["a", "b"].into_iter().zip(ids.clone()).map(|(name, id)| (name.to_owned(), id)).collect();
    let size = Some(wire::DiskUsage { used_bytes: 700, inodes_used: 1, ..Default::default() });
    let volume =
        wire::VolumeStorage { name: "v".to_owned(), is_ephemeral: true, usage: size, ..Default::default() };
    let sources = PodSources {
        candidates: vec![Candidate { uid: uid.clone(), pod: Arc::new(pod) }],
        runtime: [(uid.clone(), running)].into(),
        volumes: vec![wire::PodStorage { uid: "u".to_owned(), volumes: vec![volume], ..Default::default() }],
        has_files: true,
        ..PodSources::default()
    };
    let usage = pods(&paths, &sources).remove(&uid).unwrap();
    assert_eq!((usage.working_set, usage.processes), (Some(4600), Some(7)));
    let memory: Vec<_> = usage.containers.iter().map(|c| c.working_set).collect();
    assert_eq!(memory, [Some(4000), Some(600)]);
    assert_eq!((usage.volumes["v"].bytes, usage.ephemeral_storage), (Some(700), Some(700)), "limits apply");

    fs::remove_file(dir.path().join("cgroup/b2/memory.current")).unwrap();
    let usage = pods(&paths, &sources).remove(&uid).unwrap();
    assert_eq!((usage.working_set, usage.processes), (None, Some(7)), "a part of the pod is unknown");
}

#[test]
fn caches_of_unknown_size_are_no_observation() {
    for (version, stats) in [
        (V1, ["cgroup/memory/memory.stat", "cgroup/memory/kubepods/memory.stat"]),
        (V2, ["cgroup/memory.stat", "cgroup/kubepods/memory.stat"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &PROC);
        write(dir.path(), &version);
        for file in stats {
            fs::remove_file(dir.path().join(file)).unwrap();
        }
        let seen = memory_and_processes(&paths(dir.path()), Duration::ZERO);
        assert_eq!(seen.into_keys().collect::<Vec<_>>(), [Signal::PidAvailable]);
    }
}

#[test]
fn a_usage_above_the_capacity_of_its_file_system_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u" },
        "spec": { "containers": [{ "name": "c" }] },
    }))
    .unwrap();
    let (uid, id) = (PodUid::parse("u").unwrap(), ContainerId::parse("abc").unwrap());
    // Bytes of the layer and of a volume, and what of them counts.
    for (capacity, layer, volume, want) in [
        (Some(500), 500, 1000, (Some(500), Some(1000), 1500)),
        (Some(500), 501, 1000, (None, Some(1000), 1000)),
        (Some(500), 0, u64::MAX, (Some(0), None, 0)),
        (None, 501, 1000, (Some(501), Some(1000), 1501)),
    ] {
        let volume = wire::VolumeStorage {
            name: "v".to_owned(),
            is_ephemeral: true,
            usage: Some(wire::DiskUsage { used_bytes: volume, ..Default::default() }),
            ..Default::default()
        };
        let sources = PodSources {
            candidates: vec![Candidate { uid: uid.clone(), pod: Arc::new(pod.clone()) }],
            runtime: [(uid.clone(), vec![("c".to_owned(), id.clone())])].into(),
            writable_layers: [(id.clone(), FileUsage { bytes: Some(layer), inodes: Some(1) })].into(),
            volumes: vec![wire::PodStorage {
                uid: "u".to_owned(),
                volumes: vec![volume],
                ..Default::default()
            }],
            layers_capacity: capacity,
            has_files: true,
        };
        let usage = pods(&paths, &sources).remove(&uid).unwrap();
        let layer = usage.containers[0].writable_layer.bytes;
        assert_eq!((layer, usage.volumes["v"].bytes, usage.ephemeral_storage.unwrap()), want);
    }
}
