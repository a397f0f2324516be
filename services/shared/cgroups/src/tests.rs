use quintlet_testkit::pods::pod_of;
use serde_json::{Value, json};

use super::files::*;
use super::*;

fn uid(text: &str) -> PodUid {
    PodUid::parse(text).unwrap()
}

fn pod(resources: Value) -> Pod {
    pod_of(json!({"containers": [{"name": "c", "resources": resources}]}))
}

#[test]
fn a_pods_cgroup_is_named_by_the_drivers_rules() {
    use QosClass::{BestEffort, Burstable, Guaranteed};
    let id = uid("5f0c-1a");
    for (driver, root, class, want) in [
        (CgroupDriver::Cgroupfs, "/", Guaranteed, "/kubepods/pod5f0c-1a"),
        (CgroupDriver::Cgroupfs, "", Burstable, "/kubepods/burstable/pod5f0c-1a"),
        (CgroupDriver::Cgroupfs, "/quintlet-0", BestEffort, "/quintlet-0/kubepods/besteffort/pod5f0c-1a"),
        (CgroupDriver::Systemd, "/", Guaranteed, "/kubepods.slice/kubepods-pod5f0c_1a.slice"),
        (
            CgroupDriver::Systemd,
            "/",
            Burstable,
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f0c_1a.slice",
        ),
        (
            CgroupDriver::Systemd,
            "/",
            BestEffort,
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod5f0c_1a.slice",
        ),
        (
            CgroupDriver::Systemd,
            "/q-0",
            Guaranteed,
            "/q_0.slice/q_0-kubepods.slice/q_0-kubepods-pod5f0c_1a.slice",
        ),
    ] {
        assert_eq!(parent_name(driver, root, class, &id), want);
    }
}

#[test]
fn without_qos_cgroups_no_cgroup_is_created_or_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cgroup.controllers"), "cpu memory pids").unwrap();
    let entries = || fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name()).collect::<Vec<_>>();
    let before = entries();
    let cgroups = Cgroups::new(dir.path(), "/", CgroupSettings::default());
    let (pod, id) = (pod(json!({})), uid("5f0c-1a"));
    assert!(!cgroups.exists(&pod, &id));
    let cgroups = cgroups.with_cgroups_per_qos(false);
    assert_eq!(cgroups.pod_cgroup_parent(&pod, &id), "");
    assert!(cgroups.exists(&pod, &id), "nothing is waited for");
    cgroups.set_up_kubepods(KubepodsLimits::default(), &CpuList::default()).unwrap();
    cgroups.update_qos_cgroups(&QosTiers::default()).unwrap();
    cgroups.ensure(&pod, &id).unwrap();
    assert_eq!(before, entries());
}

#[test]
fn values_are_written_in_the_words_of_each_version() {
    let values = PodCgroup {
        cpu_shares: Some(1024),
        cpu_quota_us: Some(50_000),
        cpu_period_us: Some(100_000),
        memory_bytes: Some(1 << 20),
        pids: Some(7),
        cpus: CpuList::parse("0-1,3").ok(),
        ..PodCgroup::default()
    };
    let text = |v: &[(&str, &str)]| v.iter().map(|(a, b)| format!("{a}={b}")).collect::<Vec<_>>();
    let v2 = |v: &PodCgroup| v2_files(v).iter().map(|(f, x)| format!("{f}={x}")).collect::<Vec<_>>();
    let v1 = |v: &PodCgroup| v1_files(v).iter().map(|(_, f, x)| format!("{f}={x}")).collect::<Vec<_>>();
    assert_eq!(
        v1(&values),
        text(&[
            ("cpu.shares", "1024"),
            ("cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", "50000"),
            ("memory.limit_in_bytes", "1048576"),
            ("pids.max", "7"),
            ("cpuset.cpus", "0-1,3"),
        ])
    );
    assert_eq!(
        v2(&values),
        text(&[
            ("cpu.weight", "39"),
            ("cpu.max", "50000 100000"),
            ("memory.max", "1048576"),
            ("pids.max", "7"),
            ("cpuset.cpus", "0-1,3")
        ])
    );
    let unlimited = PodCgroup { cpu_quota_us: Some(-1), memory_bytes: Some(-1), ..PodCgroup::default() };
    assert_eq!(v1(&unlimited), text(&[("cpu.cfs_quota_us", "-1"), ("memory.limit_in_bytes", "-1")]));
    assert_eq!(v2(&unlimited), text(&[("cpu.max", "max 100000"), ("memory.max", "max")]));
    assert!(v2(&PodCgroup::default()).is_empty());
}

#[test]
fn a_pod_with_exclusive_cpus_has_no_quota() {
    let tmp = tempfile::tempdir().unwrap();
    let cgroups = Cgroups::new(tmp.path(), "/", CgroupSettings::default());
    let pod = pod(json!({"limits": {"cpu": "2", "memory": "1Gi"}}));
    let quota = |cgroups: &Cgroups| cgroups.pod_values(&pod).cpu_quota_us;
    assert_eq!(quota(&cgroups), Some(200_000));
    assert_eq!(quota(&cgroups.without_quota()), Some(-1));
}

#[test]
fn cgroup_v2_enables_controllers_for_descendants_and_names_the_missing_ones() {
    let tmp = tempfile::tempdir().unwrap();
    let root = tmp.path();
    let group = root.join("q/kubepods");
    fs::create_dir_all(&group).unwrap();
    for dir in [root, &root.join("q"), &group] {
        fs::write(dir.join("cgroup.controllers"), "cpu memory io pids\n").unwrap();
        fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
    }
    let cgroups = Cgroups::new(root, "/q", CgroupSettings::default());
    let kubepods = ["q".to_owned(), "kubepods".to_owned()];
    cgroups.make(&kubepods).unwrap();
    let handed = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
    // A plain file keeps only the last and longest of the single writes.
    assert_eq!(handed, "+pidsry");
    fs::write(group.join("cgroup.controllers"), "cpu\n").unwrap();
    assert_eq!(
        cgroups.make(&kubepods).unwrap_err().to_string(),
        "cgroup \"/q/kubepods\" has some missing controllers: memory, pids"
    );
    fs::write(group.join("cpu.weight"), "").unwrap();
    let values = PodCgroup { cpu_shares: Some(1024), ..PodCgroup::default() };
    cgroups.write(&kubepods, &values, None).unwrap();
    assert_eq!(fs::read_to_string(group.join("cpu.weight")).unwrap(), "39");
    for size in ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max", "hugetlb.1GB.max", "hugetlb.1GB.current"] {
        fs::write(group.join(size), "").unwrap();
    }
    let values = PodCgroup { hugepages: [("2Mi".to_owned(), 4 << 20)].into(), ..PodCgroup::default() };
    cgroups.write(&kubepods, &values, Some(0)).unwrap();
    let read = |f: &str| fs::read_to_string(group.join(f)).unwrap();
    assert_eq!((read("hugetlb.2MB.max"), read("hugetlb.1GB.max")), ("4194304".into(), "0".into()));
    assert_eq!(
        (read("hugetlb.2MB.rsvd.max"), read("hugetlb.1GB.current")),
        ("4194304".into(), String::new())
    );
}

// The hierarchies of this machine, below a cgroup of the test.
struct Real {
    cgroups: Cgroups,
    root: String,
}

impl Real {
    fn new(name: &str) -> Option<Self> {
        Self::at(Path::new("/sys/fs/cgroup"), name)
    }

    fn at(mount: &Path, name: &str) -> Option<Self> {
        let root = format!("/quintlet-test-{name}-{}", std::process::id());
        let cgroups =
            Cgroups::new(mount, &root, CgroupSettings { pids_limit: 50, ..CgroupSettings::default() });
        let writable = nix::unistd::geteuid().is_root() && !cgroups.hierarchies.is_empty();
        writable.then_some(Self { cgroups, root })
    }

    fn dir(&self, controller: &str, rest: &str) -> PathBuf {
        let mount = match &self.cgroups.layout {
            Layout::V1(controllers) => controllers[controller].clone(),
            Layout::V2(root) => root.clone(),
        };
        mount.join(self.root.trim_start_matches('/')).join(rest)
    }

    fn cpu(&self, rest: &str) -> u64 {
        let (file, back): (&str, fn(u64) -> u64) = match &self.cgroups.layout {
            Layout::V1(_) => ("cpu.shares", |v| v),
            Layout::V2(_) => ("cpu.weight", qos::weight_to_shares),
        };
        back(fs::read_to_string(self.dir("cpu", rest).join(file)).unwrap().trim().parse().unwrap())
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        for mount in self.cgroups.hierarchies.iter() {
            let _ = remove_dirs(&mount.join(self.root.trim_start_matches('/')));
        }
    }
}

#[tokio::test]
async fn a_pods_cgroup_exists_from_its_first_use_until_its_last_process() {
    let Some(real) = Real::new("life") else { return };
    let (id, cgroups) = (uid("u-1"), &real.cgroups);
    let limited = pod(json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}));
    assert!(!cgroups.exists(&limited, &id));
    let limits = KubepodsLimits { memory_bytes: Some(1 << 30), ..KubepodsLimits::default() };
    cgroups.set_up_kubepods(limits, &CpuList::default()).unwrap();
    cgroups.ensure(&limited, &id).unwrap();
    assert!(cgroups.exists(&limited, &id));
    assert_eq!(cgroups.pod_cgroup_parent(&limited, &id), format!("{}/kubepods/burstable/podu-1", real.root));
    assert_eq!(real.cpu("kubepods/burstable/podu-1"), 512);
    assert_eq!(real.cpu("kubepods/besteffort"), 2);
    let pids = fs::read_to_string(real.dir("pids", "kubepods/burstable/podu-1").join("pids.max")).unwrap();
    assert_eq!(pids.trim(), "50");

    cgroups.reduce_cpu_limits(&id).unwrap();
    cgroups.ensure(&limited, &id).unwrap();
    assert_eq!(real.cpu("kubepods/burstable/podu-1"), 2, "an existing cgroup is not written again");
    cgroups.ensure_with_values(&limited, &id).unwrap();
    assert_eq!(real.cpu("kubepods/burstable/podu-1"), 512, "but where it may lack its values");
    cgroups.reduce_cpu_limits(&id).unwrap();
    let tiers = QosTiers { burstable_shares: 3000, best_effort_memory: Some(1), ..QosTiers::default() };
    cgroups.update_qos_cgroups(&tiers).unwrap();
    assert!(real.cpu("kubepods/burstable").abs_diff(3000) < 60);
    assert_eq!(cgroups.pods().unwrap(), [id.clone()].into());

    let inner = real.dir("pids", "kubepods/burstable/podu-1/container");
    fs::create_dir(&inner).unwrap();
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    put(&inner.join("cgroup.procs"), &child.id().to_string()).unwrap();
    let reaped = std::thread::spawn(move || child.wait().unwrap());
    cgroups.remove_by_uid(&id).await.unwrap();
    use std::os::unix::process::ExitStatusExt as _;
    assert_eq!(reaped.join().unwrap().signal(), Some(9));
    assert!(!cgroups.exists(&limited, &id));
    assert!(cgroups.pods().unwrap().is_empty());
    cgroups.remove_by_uid(&id).await.unwrap();
}

#[test]
fn values_of_a_cgroup_change_one_by_one_and_are_read_back() {
    let Some(real) = Real::new("resize") else { return };
    let (id, cgroups) = (uid("u-3"), &real.cgroups);
    let limited = pod(json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}));
    cgroups.ensure(&limited, &id).unwrap();
    let before = cgroups.current_values(&limited, &id).unwrap();
    assert_eq!((before.memory_limit, before.cpu_quota_us), (Some(64 << 20), Some(100_000)));
    assert!(before.cpu_shares.abs_diff(512) < 30 && before.memory_usage < 64 << 20, "{before:?}");
    let memory = PodCgroup { memory_bytes: Some(96 << 20), ..PodCgroup::default() };
    cgroups.set_values(&limited, &id, &memory).unwrap();
    assert_eq!(
        cgroups.current_values(&limited, &id).unwrap(),
        CgroupState { memory_limit: Some(96 << 20), ..before }
    );
    let unlimited = PodCgroup { cpu_quota_us: Some(-1), ..PodCgroup::default() };
    cgroups.set_values(&limited, &id, &unlimited).unwrap();
    assert_eq!(cgroups.current_values(&limited, &id).unwrap().cpu_quota_us, None);

    let free = pod(json!({}));
    cgroups.ensure(&free, &uid("u-4")).unwrap();
    let now = cgroups.current_values(&free, &uid("u-4")).unwrap();
    assert_eq!((now.memory_limit, now.cpu_quota_us, now.cpu_shares), (None, None, 2));
    assert!(
        cgroups.current_values(&free, &uid("absent")).is_err(),
        "what cannot be read is not taken for no limit"
    );

    let without = cgroups.clone().with_cgroups_per_qos(false);
    assert_eq!(without.current_values(&free, &uid("absent")).unwrap(), CgroupState::default());
    assert_eq!(without.pod_values(&limited), PodCgroup::default());
}

#[test]
fn values_of_cgroup_version_2_are_parsed_in_its_format() {
    let tmp = tempfile::tempdir().unwrap();
    let root = tmp.path();
    fs::write(root.join("cgroup.controllers"), "cpu memory\n").unwrap();
    let group = root.join("q/kubepods/besteffort/podu5");
    fs::create_dir_all(&group).unwrap();
    let cgroups = Cgroups::new(root, "/q", CgroupSettings::default());
    let (free, id) = (pod(json!({})), uid("u5"));
    let read = |weight: &str, cpu: &str, max: &str, low: &str| {
        for (file, text) in [
            ("cpu.weight", weight),
            ("cpu.max", cpu),
            ("memory.max", max),
            ("memory.current", "4096\n"),
            ("memory.min", "0\n"),
            ("memory.low", low),
        ] {
            fs::write(group.join(file), text).unwrap();
        }
        cgroups.current_values(&free, &id).unwrap()
    };
    let now = read("39\n", "50000 100000\n", "1048576\n", "65536\n");
    assert!(now.cpu_shares.abs_diff(1024) < 30, "{now:?}");
    assert_eq!((now.cpu_quota_us, now.memory_limit, now.memory_usage), (Some(50_000), Some(1 << 20), 4096));
    assert_eq!(now.memory_protected, Some(65_536));
    let free_of_limits = read("1\n", "max 100000\n", "max\n", "max\n");
    assert_eq!((free_of_limits.cpu_quota_us, free_of_limits.memory_limit), (None, None));
    assert_eq!(free_of_limits.memory_protected, Some(i64::MAX));
}

#[test]
fn owned_cgroups_are_recognised_by_their_mark() {
    // With v1, the v2 hierarchy may be mounted as well.
    for mount in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        let mount = Path::new(mount);
        if !is_v2(mount) && mount.ends_with("unified") {
            continue;
        }
        let Some(real) = Real::at(mount, "mark") else { return };
        let (mine, others) =
            (real.cgroups.clone().with_owner("me /root"), real.cgroups.clone().with_owner("you /root"));
        let free = pod(json!({}));
        // If the controllers are v1, the v2 hierarchy has no files to write.
        let make = |cgroups: &Cgroups, id: &str| {
            cgroups.make_pod(&cgroups.group(&free, &uid(id)), QosClass::Guaranteed).unwrap();
        };
        make(&mine, "u-mine");
        make(&others, "u-theirs");
        make(&real.cgroups, "u-nobodys");
        assert_eq!(mine.owned_pods(&HashSet::new()), [uid("u-mine")].into(), "{}", mount.display());
        assert_eq!(others.owned_pods(&HashSet::new()), [uid("u-theirs")].into());
        assert_eq!(
            real.cgroups.owned_pods(&HashSet::new()),
            BTreeSet::new(),
            "who has no name has no groups"
        );
        assert_eq!(mine.owned_pods(&[uid("u-mine")].into()), BTreeSet::new());
        assert_eq!(mine.pods().unwrap().len(), 3);
    }
}

#[test]
fn a_cgroup_missing_in_one_hierarchy_is_created_there() {
    let Some(real) = Real::new("part") else { return };
    let best_effort = pod(json!({}));
    real.cgroups.ensure(&best_effort, &uid("u2")).unwrap();
    if let Layout::V1(_) = real.cgroups.layout {
        fs::remove_dir(real.dir("memory", "kubepods/besteffort/podu2")).unwrap();
        assert!(!real.cgroups.exists(&best_effort, &uid("u2")));
        real.cgroups.ensure(&best_effort, &uid("u2")).unwrap();
        let cpus = fs::read_to_string(real.dir("cpuset", "kubepods/besteffort/podu2").join("cpuset.cpus"));
        assert!(!cpus.unwrap().trim().is_empty(), "an empty cpuset runs nothing");
    }
    assert!(real.cgroups.exists(&best_effort, &uid("u2")));
}

#[test]
fn a_slice_path_has_its_parent_slices_and_contains_the_pods_uid() {
    let cgroups = Cgroups::new(Path::new("/nowhere"), "/", CgroupSettings::default());
    assert_eq!(cgroups.driver(), CgroupDriver::Cgroupfs);
    assert!(cgroups.clone().set_driver(CgroupDriver::Systemd), "clones are of one mind");
    assert!(!cgroups.set_driver(CgroupDriver::Systemd));
    let best_effort = pod(json!({}));
    let parent = cgroups.pod_cgroup_parent(&best_effort, &uid("5f0c-1a"));
    assert_eq!(parent, "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod5f0c_1a.slice");
    let name = parent.rsplit('/').next().unwrap();
    assert_eq!(names::uid_of(CgroupDriver::Systemd, name), Some(uid("5f0c-1a")));
    assert_eq!(names::uid_of(CgroupDriver::Cgroupfs, "pod5f0c-1a"), Some(uid("5f0c-1a")));
    for (driver, other) in [
        (CgroupDriver::Systemd, "kubepods-burstable.slice"),
        (CgroupDriver::Systemd, "pod5f0c-1a"),
        (CgroupDriver::Cgroupfs, "burstable"),
    ] {
        assert_eq!(names::uid_of(driver, other), None, "{other}");
    }
}

#[test]
fn a_cgroup_of_the_configuration_is_named_as_the_driver_names_it() {
    let shown = |driver, name: &str| names::path(driver, &names::parse(driver, name)).display().to_string();
    for (name, cgroupfs, systemd) in [
        ("/system.slice", "system.slice", "system.slice"),
        ("system.slice", "system.slice", "system.slice"),
        ("/kube", "kube", "kube.slice"),
        ("/a/b", "a/b", "b.slice"),
        (
            "/kube.slice/kube-node_agents.slice",
            "kube.slice/kube-node_agents.slice",
            "kube.slice/kube-node_agents.slice",
        ),
    ] {
        assert_eq!(shown(CgroupDriver::Cgroupfs, name), cgroupfs, "{name}");
        assert_eq!(shown(CgroupDriver::Systemd, name), systemd, "{name}");
    }
}

#[test]
fn all_pods_have_the_cpus_of_the_machine_that_the_parent_cgroup_has() {
    let Some(real) = Real::new("cpus") else { return };
    let online = CpuList::parse(&fs::read_to_string("/sys/devices/system/cpu/online").unwrap()).unwrap();
    let cpus = |rest: &str| fs::read_to_string(real.dir("cpuset", rest).join("cpuset.cpus")).unwrap();
    real.cgroups.set_up_kubepods(KubepodsLimits::default(), &online).unwrap();
    assert_eq!(cpus("kubepods").trim(), online.to_string());
    let is_v1 = matches!(real.cgroups.layout, Layout::V1(_));
    // A list that someone else makes shorter becomes whole again.
    let first = online.iter().next().unwrap().to_string();
    for group in ["kubepods/burstable", "kubepods/besteffort", "kubepods", ""] {
        let file = real.dir("cpuset", group).join("cpuset.cpus");
        if is_v1 || group == "kubepods" {
            put(&file, &first).unwrap();
        }
    }
    if is_v1 {
        real.cgroups.set_up_kubepods(KubepodsLimits::default(), &online).unwrap();
        assert_eq!(cpus("kubepods").trim(), first, "the kernel refuses CPUs that the parent lacks");
        put(&real.dir("cpuset", "cpuset.cpus"), &online.to_string()).unwrap();
    }
    real.cgroups.set_up_kubepods(KubepodsLimits::default(), &online).unwrap();
    assert_eq!(cpus("kubepods").trim(), online.to_string());
}

#[test]
fn an_existing_cgroup_is_limited_and_a_missing_one_is_an_error() {
    let Some(real) = Real::new("reserved") else { return };
    let values = PodCgroup {
        cpu_shares: Some(512),
        memory_bytes: Some(64 << 20),
        pids: Some(33),
        ..PodCgroup::default()
    };
    let error = real.cgroups.limit_existing(&real.root, &values).unwrap_err().to_string();
    if let Layout::V1(_) = real.cgroups.layout {
        let group = real.root.trim_start_matches('/');
        assert!(
            error.starts_with(&format!("cgroup [{group:?}] has some missing paths: /sys/fs/cgroup/")),
            "{error}"
        );
    } else {
        assert!(error.starts_with("could not read controllers /sys/fs/cgroup/"), "{error}");
    }
    real.cgroups.make(&names::below_root(&real.root, &[])).unwrap();
    real.cgroups.limit_existing(&real.root, &values).unwrap();
    assert!(real.cpu("").abs_diff(512) < 30);
    assert_eq!(fs::read_to_string(real.dir("pids", "pids.max")).unwrap().trim(), "33");
}

#[test]
fn a_cgroup_of_version_2_needs_all_controllers_of_the_root() {
    let tmp = tempfile::tempdir().unwrap();
    let group = tmp.path().join("kube");
    fs::write(tmp.path().join("cgroup.controllers"), "cpu memory pids io\n").unwrap();
    let cgroups = Cgroups::new(tmp.path(), "/", CgroupSettings::default());
    let values = PodCgroup { memory_bytes: Some(1 << 20), ..PodCgroup::default() };
    let limit = || cgroups.limit_existing("/kube", &values).map_err(|e| e.to_string());
    assert!(limit().unwrap_err().starts_with("could not read controllers"), "it is not created");
    assert!(!group.exists());
    fs::create_dir(&group).unwrap();
    for file in ["memory.max", "hugetlb.2MB.max"] {
        fs::write(group.join(file), "").unwrap();
    }
    fs::write(group.join("cgroup.controllers"), "memory\n").unwrap();
    assert_eq!(limit().unwrap_err(), "cgroup \"/kube\" has some missing controllers: cpu, pids");
    fs::write(group.join("cgroup.controllers"), "cpu memory pids\n").unwrap();
    limit().unwrap();
    assert_eq!(fs::read_to_string(group.join("memory.max")).unwrap(), "1048576");
    assert_eq!(fs::read_to_string(group.join("hugetlb.2MB.max")).unwrap(), "0");
}

#[test]
fn tiers_get_the_values_of_their_pods() {
    let tmp = tempfile::tempdir().unwrap();
    for dir in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"] {
        let dir = tmp.path().join(dir);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup.controllers"), "cpu memory\n").unwrap();
        for file in ["cpu.weight", "memory.min", "memory.low", "memory.max", "hugetlb.2MB.max"] {
            fs::write(dir.join(file), "").unwrap();
        }
        fs::write(dir.join("memory.current"), "4096\n").unwrap();
    }
    let cgroups = Cgroups::new(tmp.path(), "/", CgroupSettings::default());
    let read = |file: &str| fs::read_to_string(tmp.path().join("kubepods").join(file)).unwrap();
    let tiers = QosTiers { burstable_shares: 1024, ..QosTiers::default() };
    cgroups.update_qos_cgroups(&tiers).unwrap();
    assert_eq!((read("burstable/cpu.weight"), read("besteffort/cpu.weight")), ("39".into(), "1".into()));
    assert_eq!((read("burstable/memory.max"), read("memory.min")), (String::new(), String::new()));
    let tiers = QosTiers {
        burstable_memory: Some(1 << 20),
        best_effort_memory: Some(1),
        memory_min: Some(512),
        memory_low: Some(256),
        ..tiers
    };
    cgroups.update_qos_cgroups(&tiers).unwrap();
    assert_eq!((read("memory.min"), read("burstable/memory.low")), ("512".into(), "256".into()));
    assert_eq!(read("burstable/memory.max"), "1048576");
    assert_eq!(read("besteffort/memory.max"), "4096", "not below the memory in use");
    assert_eq!(read("burstable/hugetlb.2MB.max"), UNLIMITED.to_string());
}

#[test]
fn a_process_is_moved_in_all_hierarchies() {
    let Some(real) = Real::new("moved") else { return };
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let name = format!("{}/agents/kubelet", real.root);
    let moved = real
        .cgroups
        .move_process(&name, child.id())
        .and_then(|()| real.cgroups.move_process(&name, child.id()));
    let places = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    let is_kernel = is_kernel_thread(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    moved.unwrap();
    assert!(!is_kernel);
    let controllers: Vec<&str> = match &real.cgroups.layout {
        Layout::V1(controllers) => {
            controllers.keys().map(String::as_str).filter(|c| *c != "unified").collect()
        }
        Layout::V2(_) => vec![""],
    };
    for controller in controllers {
        let here = |line: &&str| line.contains(controller) && line.ends_with(&name);
        assert!(places.lines().any(|line| here(&line)), "{controller}: {places}");
    }
}

#[test]
fn processes_of_the_root_cgroup_are_moved_except_the_kernels() {
    let tmp = tempfile::tempdir().unwrap();
    let group = tmp.path().join("system");
    fs::create_dir(&group).unwrap();
    for (file, text) in
        [("cgroup.controllers", "cpu\n"), ("cgroup.subtree_control", ""), ("cgroup.procs", "1\n2\n30\n")]
    {
        fs::write(tmp.path().join(file), text).unwrap();
    }
    fs::write(group.join("cgroup.procs"), "").unwrap();
    let cgroups = Cgroups::new(tmp.path(), "/", CgroupSettings::default());
    cgroups.move_root_processes("/system", |pid| pid == 2).unwrap();
    assert_eq!(fs::read_to_string(group.join("cgroup.procs")).unwrap(), "30");
    fs::write(tmp.path().join("cgroup.procs"), "1\n2\n").unwrap();
    fs::write(group.join("cgroup.procs"), "").unwrap();
    cgroups.move_root_processes("/system", |pid| pid == 2).unwrap();
    assert_eq!(fs::read_to_string(group.join("cgroup.procs")).unwrap(), "", "the init process stays");
    fs::remove_file(tmp.path().join("cgroup.procs")).unwrap();
    assert!(cgroups.move_root_processes("/system", |_| false).is_err());
}
