//! Cgroups of pods, both versions, cgroupfs driver (resources.md §2, §3, §6).
//!
//! A small writer of its own rather than `cgroups-rs`: that takes its hierarchies from this process's mount table, so
//! neither tests nor a second root can move it, and it fails where a controller is missing, which is usual on version
//! one. What is left of the job is a dozen files. With the systemd driver the groups are units, which are named here
//! ([`parent_name`]) and made by systemd; their limits are not written.
//!
//! Everything here blocks for as long as the kernel takes, which is short, but [`Cgroups::remove_by_uid`], which waits
//! for killed processes on a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_model::ids::PodUid;

use crate::decide::qos::{self, CgroupSettings, PodCgroup, QosClass};

const KUBEPODS: &str = "kubepods";
const BURSTABLE: &str = "burstable";
const BESTEFFORT: &str = "besteffort";
const MIN_SHARES: u64 = 2;
// Upstream's number; a process that forks faster than this is killed on the next pass.
const KILL_ROUNDS: u32 = 5;
const KILL_PAUSE: Duration = Duration::from_millis(20);
// A group is busy for a moment after its last process was reaped: 10 ms doubling, about 600 ms in all.
const REMOVE_ATTEMPTS: u32 = 6;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);
// What the kernel takes as no limit of huge pages.
const UNBOUNDED: i64 = 1 << 62;
// Version 1: a group must be in these where they are mounted.
const V1_REQUIRED: [&str; 7] = ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd", "hugetlb"];
// Version 2: what is handed down the tree where the root has it.
const V2_CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "hugetlb", "pids"];

/// The unified hierarchy is mounted at `root`.
#[must_use]
pub fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// Whether groups of the unified hierarchy have a swap limit: this process's own group tells.
#[must_use]
pub fn has_swap_controller() -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().find_map(|l| l.strip_prefix("0::")).is_some_and(|own| {
        Path::new("/sys/fs/cgroup").join(own.trim_start_matches('/')).join("memory.swap.max").exists()
    })
}

/// Who makes groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Driver {
    /// This agent and the OCI runtime, as directories.
    #[default]
    Cgroupfs,
    /// systemd, as slices and scopes.
    Systemd,
}

/// A cgroup cannot be made, checked or removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A controller cannot be had in the group.
    #[error("cgroup {group:?} has some missing controllers: {}", missing.join(", "))]
    Missing {
        /// The group.
        group: String,
        /// Controllers, in order.
        missing: Vec<String>,
    },
    /// A directory or value cannot be written.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Processes outlived five rounds of SIGKILL.
    #[error("failed to kill all the processes attached to the {group} cgroups : {left:?}")]
    Kill {
        /// The group.
        group: String,
        /// Pids that are left.
        left: Vec<i32>,
    },
    /// A group cannot be removed.
    #[error("failed to delete cgroup paths for {group} : {source}")]
    Delete {
        /// The group.
        group: String,
        /// Why.
        source: io::Error,
    },
    /// The thread that removes was cut off.
    #[error("removal of the cgroups of pod {0} was cut off")]
    Cancelled(PodUid),
}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> CgroupError + 'a {
    move |source| CgroupError::Io { what, path: path.to_owned(), source }
}

fn tier(class: QosClass) -> Option<&'static str> {
    match class {
        // Guaranteed pods have no tier: they stand directly below kubepods.
        QosClass::Guaranteed => None,
        QosClass::Burstable => Some(BURSTABLE),
        QosClass::BestEffort => Some(BESTEFFORT),
    }
}

fn components(root: &str, class: QosClass, uid: &PodUid) -> Vec<String> {
    let root = root.split('/').filter(|c| !c.is_empty()).map(str::to_owned);
    let tail = [Some(KUBEPODS.to_owned()), tier(class).map(str::to_owned), Some(format!("pod{uid}"))];
    root.chain(tail.into_iter().flatten()).collect()
}

/// A pod's group as the driver names it: exactly the CRI's `cgroup_parent`. `root` is `--cgroup-root`.
#[must_use]
pub fn parent_name(driver: Driver, root: &str, class: QosClass, uid: &PodUid) -> String {
    let parts = components(root, class, uid);
    match driver {
        Driver::Cgroupfs => format!("/{}", parts.join("/")),
        Driver::Systemd => {
            let mut path = String::new();
            let mut slice = String::new();
            for part in &parts {
                if !slice.is_empty() {
                    slice.push('-');
                }
                slice.push_str(&part.replace('-', "_"));
                path.push_str(&format!("/{slice}.slice"));
            }
            path
        }
    }
}

/// Limits of all pods together; `None` is "do not write".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeLimits {
    /// Thousandths of a CPU.
    pub cpu_milli: Option<i64>,
    /// Bytes.
    pub memory_bytes: Option<i64>,
    /// Processes.
    pub pids: Option<i64>,
}

#[derive(Debug, Clone)]
enum Layout {
    /// Name of a controller to where it is mounted; several names may share a mount.
    V1(BTreeMap<String, PathBuf>),
    V2(PathBuf),
}

/// The cgroups of this node's pods.
#[derive(Debug, Clone)]
pub struct Cgroups {
    layout: Layout,
    root: String,
    settings: CgroupSettings,
}

impl Cgroups {
    /// Groups in the hierarchies mounted at `mount` (`/sys/fs/cgroup`), below the group `root` (`--cgroup-root`).
    #[must_use]
    pub fn new(mount: &Path, root: &str, settings: CgroupSettings) -> Self {
        let layout = if is_v2(mount) {
            Layout::V2(mount.to_owned())
        } else {
            let mounts = fs::read_dir(mount).into_iter().flatten().flatten();
            Layout::V1(
                mounts
                    .filter(|e| e.path().join("cgroup.procs").exists())
                    .filter_map(|e| Some((e.file_name().into_string().ok()?, e.path())))
                    .collect(),
            )
        };
        Self { layout, root: root.to_owned(), settings }
    }

    /// The pod's `cgroup_parent`.
    #[must_use]
    pub fn parent(&self, pod: &Pod, uid: &PodUid) -> String {
        parent_name(Driver::Cgroupfs, &self.root, qos::qos_class(pod), uid)
    }

    /// Makes `kubepods` and the tiers, and limits what all pods take together. Values of a group that is there are
    /// brought up to date.
    ///
    /// # Errors
    /// A group cannot be made or written.
    pub fn set_up(&self, limits: NodeLimits) -> Result<(), CgroupError> {
        for class in [QosClass::Burstable, QosClass::BestEffort] {
            self.make_tier(class)?;
        }
        let values = PodCgroup {
            cpu_shares: limits.cpu_milli.map(qos::milli_to_shares),
            memory_bytes: limits.memory_bytes,
            pids: limits.pids,
            ..PodCgroup::default()
        };
        self.write(&self.below_root(&[KUBEPODS]), &values, None)
    }

    /// Gives the burstable tier the shares its pods request together ([`qos::burstable_shares`]).
    ///
    /// # Errors
    /// The tier cannot be made or written.
    pub fn update_tiers(&self, burstable_shares: u64) -> Result<(), CgroupError> {
        self.make_tier(QosClass::Burstable)?;
        self.make_tier(QosClass::BestEffort)?;
        let shares = |shares| PodCgroup { cpu_shares: Some(shares), ..PodCgroup::default() };
        self.write(&self.below_root(&[KUBEPODS, BURSTABLE]), &shares(burstable_shares), Some(UNBOUNDED))?;
        self.write(&self.below_root(&[KUBEPODS, BESTEFFORT]), &shares(MIN_SHARES), Some(UNBOUNDED))
    }

    /// Whether the pod's group is there, in every hierarchy that counts.
    #[must_use]
    pub fn exists(&self, pod: &Pod, uid: &PodUid) -> bool {
        self.missing(&self.group(pod, uid)).is_empty()
    }

    /// Makes the pod's group with its values. One that is there is left as it is.
    ///
    /// # Errors
    /// The caller prefixes `unable to ensure pod container exists: `.
    pub fn ensure(&self, pod: &Pod, uid: &PodUid) -> Result<(), CgroupError> {
        let group = self.group(pod, uid);
        if self.missing(&group).is_empty() {
            return Ok(());
        }
        self.make_tier(qos::qos_class(pod))?;
        self.make(&group)?;
        self.write(&group, &qos::pod_cgroup(pod, self.settings), Some(0))
    }

    /// UIDs of all pods that have a group anywhere.
    ///
    /// # Errors
    /// A hierarchy cannot be read.
    pub fn list(&self) -> Result<BTreeSet<PodUid>, CgroupError> {
        let mut out = BTreeSet::new();
        for mount in self.mounts() {
            for parent in self.pod_parents() {
                let dir = mount.join(&parent);
                let entries = match fs::read_dir(&dir) {
                    Ok(entries) => entries,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    Err(e) => return Err(io_error("cannot read", &dir)(e)),
                };
                out.extend(entries.flatten().filter_map(|e| {
                    let name = e.file_name();
                    PodUid::parse(name.to_str()?.strip_prefix("pod")?).ok().filter(|_| e.path().is_dir())
                }));
            }
        }
        Ok(out)
    }

    /// Leaves a pod that is gone, but whose volumes are not, the least CPU there is.
    ///
    /// # Errors
    /// A value cannot be written.
    pub fn reduce_cpu(&self, uid: &PodUid) -> Result<(), CgroupError> {
        let values = PodCgroup { cpu_shares: Some(MIN_SHARES), ..PodCgroup::default() };
        for parent in self.pod_parents() {
            let group = parent.join(format!("pod{uid}"));
            if self.mounts().iter().any(|m| m.join(&group).is_dir()) {
                self.write(&group, &values, None)?;
            }
        }
        Ok(())
    }

    /// Kills every process of the pod's groups, whatever its class, and removes them. None is fine.
    ///
    /// # Errors
    /// Processes or groups outlast the attempts; it is safe to try again.
    pub async fn remove_by_uid(&self, uid: &PodUid) -> Result<(), CgroupError> {
        let (cgroups, pod) = (self.clone(), uid.clone());
        tokio::task::spawn_blocking(move || cgroups.remove(&pod))
            .await
            .unwrap_or_else(|_| Err(CgroupError::Cancelled(uid.clone())))
    }

    fn remove(&self, uid: &PodUid) -> Result<(), CgroupError> {
        for parent in self.pod_parents() {
            let group = parent.join(format!("pod{uid}"));
            let dirs: Vec<PathBuf> =
                self.mounts().into_iter().map(|m| m.join(&group)).filter(|d| d.is_dir()).collect();
            if dirs.is_empty() {
                continue;
            }
            let name = format!("/{}", group.display());
            kill_all(&name, &dirs)?;
            for dir in &dirs {
                remove_dirs(dir).map_err(|source| CgroupError::Delete { group: name.clone(), source })?;
            }
        }
        Ok(())
    }

    fn group(&self, pod: &Pod, uid: &PodUid) -> PathBuf {
        components(&self.root, qos::qos_class(pod), uid).iter().collect()
    }

    fn below_root(&self, parts: &[&str]) -> PathBuf {
        self.root.split('/').filter(|c| !c.is_empty()).chain(parts.iter().copied()).collect()
    }

    fn pod_parents(&self) -> [PathBuf; 3] {
        [
            self.below_root(&[KUBEPODS]),
            self.below_root(&[KUBEPODS, BURSTABLE]),
            self.below_root(&[KUBEPODS, BESTEFFORT]),
        ]
    }

    // Each hierarchy once, though two controllers may share one.
    fn mounts(&self) -> Vec<PathBuf> {
        match &self.layout {
            Layout::V2(root) => vec![root.clone()],
            Layout::V1(controllers) => {
                let mut seen = BTreeSet::new();
                let real = |p: &Path| fs::canonicalize(p).unwrap_or_else(|_| p.to_owned());
                controllers.values().filter(|p| seen.insert(real(p))).cloned().collect()
            }
        }
    }

    fn missing(&self, group: &Path) -> Vec<String> {
        match &self.layout {
            Layout::V1(controllers) => V1_REQUIRED
                .iter()
                .filter(|c| controllers.get(**c).is_some_and(|mount| !mount.join(group).is_dir()))
                .map(|c| (*c).to_owned())
                .collect(),
            Layout::V2(root) => {
                let words = |dir: &Path| -> BTreeSet<String> {
                    let text = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
                    text.split_whitespace().map(str::to_owned).collect()
                };
                let (all, own) = (words(root), words(&root.join(group)));
                let lacks = |c: &&&str| all.contains(**c) && !own.contains(**c);
                V2_CONTROLLERS.iter().filter(lacks).map(|c| (*c).to_owned()).collect()
            }
        }
    }

    fn make_tier(&self, class: QosClass) -> Result<(), CgroupError> {
        self.make(&self.below_root(&[KUBEPODS]))?;
        let Some(name) = tier(class) else { return Ok(()) };
        let group = self.below_root(&[KUBEPODS, name]);
        if self.missing(&group).is_empty() {
            return Ok(());
        }
        self.make(&group)?;
        let shares = (class == QosClass::BestEffort).then_some(MIN_SHARES);
        self.write(&group, &PodCgroup { cpu_shares: shares, ..PodCgroup::default() }, Some(UNBOUNDED))
    }

    fn make(&self, group: &Path) -> Result<(), CgroupError> {
        match &self.layout {
            Layout::V1(controllers) => {
                for (name, mount) in controllers {
                    // The unified hierarchy of a hybrid machine has no controllers to give; the runtime leaves it too.
                    if name != "unified" {
                        make_v1(mount, group, name.contains("cpuset"))?;
                    }
                }
            }
            Layout::V2(root) => make_v2(root, group)?,
        }
        let missing = self.missing(group);
        if missing.is_empty() {
            return Ok(());
        }
        Err(CgroupError::Missing { group: format!("/{}", group.display()), missing })
    }

    /// Writes values; controllers that are not mounted are skipped. Page sizes without a value get `hugepages`.
    fn write(&self, group: &Path, values: &PodCgroup, hugepages: Option<i64>) -> Result<(), CgroupError> {
        let files = match &self.layout {
            Layout::V1(controllers) => v1_files(values)
                .into_iter()
                .filter_map(|(c, file, value)| Some((controllers.get(c)?.join(group).join(file), value)))
                .collect(),
            Layout::V2(root) => {
                let dir = root.join(group);
                v2_files(values).into_iter().map(|(file, value)| (dir.join(file), value)).collect::<Vec<_>>()
            }
        };
        for (path, value) in files {
            put(&path, &value).map_err(io_error("cannot write", &path))?;
        }
        if let Some(default) = hugepages {
            self.write_hugepages(group, values, default)?;
        }
        Ok(())
    }

    fn write_hugepages(&self, group: &Path, values: &PodCgroup, default: i64) -> Result<(), CgroupError> {
        let (dir, suffixes): (PathBuf, &[&str]) = match &self.layout {
            Layout::V1(controllers) => match controllers.get("hugetlb") {
                Some(mount) => (mount.join(group), &[".limit_in_bytes"]),
                None => return Ok(()),
            },
            Layout::V2(root) => (root.join(group), &[".rsvd.max", ".max"]),
        };
        for entry in fs::read_dir(&dir).map_err(io_error("cannot read", &dir))?.flatten() {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|n| n.strip_prefix("hugetlb.")) else { continue };
            let Some(size) = suffixes.iter().find_map(|s| rest.strip_suffix(s)) else { continue };
            // Version 1 has `2MB.rsvd` too, which upstream leaves alone.
            if size.contains('.') {
                continue;
            }
            let asked = values.hugepages.iter().find(|(k, _)| page_size_is(k, size)).map(|(_, v)| *v);
            let path = entry.path();
            put(&path, &asked.unwrap_or(default).to_string()).map_err(io_error("cannot write", &path))?;
        }
        Ok(())
    }
}

fn page_size_is(resource: &str, file: &str) -> bool {
    crate::decide::quantity::Quantity::parse(resource)
        .ok()
        .and_then(|q| u64::try_from(q.value()).ok())
        .is_some_and(|bytes| crate::build::resources::page_size_name(bytes) == file)
}

fn v1_files(values: &PodCgroup) -> Vec<(&'static str, &'static str, String)> {
    // The period goes first: a quota is checked against it.
    [
        ("cpu", "cpu.shares", values.cpu_shares.map(|v| v.to_string())),
        ("cpu", "cpu.cfs_period_us", values.cpu_period_us.map(|v| v.to_string())),
        ("cpu", "cpu.cfs_quota_us", values.cpu_quota_us.map(|v| v.to_string())),
        ("memory", "memory.limit_in_bytes", values.memory_bytes.map(|v| v.to_string())),
        ("pids", "pids.max", values.pids.map(limit)),
    ]
    .into_iter()
    .filter_map(|(controller, file, value)| Some((controller, file, value?)))
    .collect()
}

fn v2_files(values: &PodCgroup) -> Vec<(&'static str, String)> {
    let period = values.cpu_period_us.unwrap_or(qos::DEFAULT_PERIOD_US);
    [
        ("cpu.weight", values.cpu_shares.map(|v| qos::shares_to_weight(v).to_string())),
        ("cpu.max", values.cpu_quota_us.map(|quota| format!("{} {period}", limit(quota)))),
        ("memory.max", values.memory_bytes.map(limit)),
        ("pids.max", values.pids.map(limit)),
    ]
    .into_iter()
    .filter_map(|(file, value)| Some((file, value?)))
    .collect()
}

fn limit(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

// Never creates: a file that is not there is a controller that is not there.
fn put(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

fn mkdir(dir: &Path) -> Result<bool, CgroupError> {
    match fs::create_dir(dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(io_error("cannot create", dir)(e)),
    }
}

fn make_v1(mount: &Path, group: &Path, cpuset: bool) -> Result<(), CgroupError> {
    let mut dir = mount.to_owned();
    for part in group {
        let parent = dir.clone();
        dir.push(part);
        mkdir(&dir)?;
        // A new cpuset is empty, and nothing can run in an empty one.
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|_| cpuset) {
            let own = dir.join(file);
            if fs::read_to_string(&own).is_ok_and(|v| v.trim().is_empty()) {
                let above =
                    fs::read_to_string(parent.join(file)).map_err(io_error("cannot read", &parent))?;
                put(&own, above.trim()).map_err(io_error("cannot write", &own))?;
            }
        }
    }
    Ok(())
}

fn make_v2(root: &Path, group: &Path) -> Result<(), CgroupError> {
    let mut dir = root.to_owned();
    for part in group {
        let has = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
        for controller in V2_CONTROLLERS.iter().filter(|c| has.split_whitespace().any(|h| h == **c)) {
            // Each by itself, so that one that cannot be had does not cost the others; what is missing at the end of
            // the way is the error.
            if let Err(e) = put(&dir.join("cgroup.subtree_control"), &format!("+{controller}")) {
                tracing::debug!(path = %dir.display(), controller, error = %e, "cannot hand a controller down");
            }
        }
        dir.push(part);
        mkdir(&dir)?;
    }
    Ok(())
}

fn subdirs(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn pids(dir: &Path, out: &mut BTreeSet<i32>) {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    // A process outside this pid namespace reads as 0, which is nobody to kill.
    out.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()).filter(|p| *p > 1));
    for sub in subdirs(dir) {
        pids(&sub, out);
    }
}

fn kill_all(group: &str, dirs: &[PathBuf]) -> Result<(), CgroupError> {
    let mut left = BTreeSet::new();
    for _ in 0..KILL_ROUNDS {
        left.clear();
        dirs.iter().for_each(|d| pids(d, &mut left));
        if left.is_empty() {
            return Ok(());
        }
        for pid in &left {
            // Gone already is as good as killed.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        std::thread::sleep(KILL_PAUSE);
    }
    left.clear();
    dirs.iter().for_each(|d| pids(d, &mut left));
    if left.is_empty() {
        return Ok(());
    }
    Err(CgroupError::Kill { group: group.to_owned(), left: left.into_iter().collect() })
}

fn remove_dirs(dir: &Path) -> io::Result<()> {
    for sub in subdirs(dir) {
        remove_dirs(&sub)?;
    }
    let mut pause = REMOVE_PAUSE;
    for attempt in 1.. {
        match fs::remove_dir(dir) {
            Ok(()) => break,
            Err(e) if e.kind() == io::ErrorKind::NotFound => break,
            Err(e) if attempt >= REMOVE_ATTEMPTS => return Err(e),
            Err(_) => {
                std::thread::sleep(pause);
                pause *= 2;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::testing::pod_of;
    use serde_json::{Value, json};

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn pod(resources: Value) -> Pod {
        pod_of(json!({"containers": [{"name": "c", "resources": resources}]}))
    }

    #[test]
    fn a_pods_group_is_named_as_the_driver_wants_it() {
        use QosClass::{BestEffort, Burstable, Guaranteed};
        let id = uid("5f0c-1a");
        for (driver, root, class, want) in [
            (Driver::Cgroupfs, "/", Guaranteed, "/kubepods/pod5f0c-1a"),
            (Driver::Cgroupfs, "", Burstable, "/kubepods/burstable/pod5f0c-1a"),
            (Driver::Cgroupfs, "/quintlet-0", BestEffort, "/quintlet-0/kubepods/besteffort/pod5f0c-1a"),
            (Driver::Systemd, "/", Guaranteed, "/kubepods.slice/kubepods-pod5f0c_1a.slice"),
            (
                Driver::Systemd,
                "/",
                Burstable,
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f0c_1a.slice",
            ),
            (
                Driver::Systemd,
                "/",
                BestEffort,
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod5f0c_1a.slice",
            ),
            (
                Driver::Systemd,
                "/q-0",
                Guaranteed,
                "/q_0.slice/q_0-kubepods.slice/q_0-kubepods-pod5f0c_1a.slice",
            ),
        ] {
            assert_eq!(parent_name(driver, root, class, &id), want);
        }
    }

    #[test]
    fn values_are_written_in_the_words_of_each_version() {
        let values = PodCgroup {
            cpu_shares: Some(1024),
            cpu_quota_us: Some(50_000),
            cpu_period_us: Some(100_000),
            memory_bytes: Some(1 << 20),
            pids: Some(7),
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
            ])
        );
        assert_eq!(
            v2(&values),
            text(&[
                ("cpu.weight", "39"),
                ("cpu.max", "50000 100000"),
                ("memory.max", "1048576"),
                ("pids.max", "7")
            ])
        );
        let unlimited = PodCgroup { cpu_quota_us: Some(-1), memory_bytes: Some(-1), ..PodCgroup::default() };
        assert_eq!(v1(&unlimited), text(&[("cpu.cfs_quota_us", "-1"), ("memory.limit_in_bytes", "-1")]));
        assert_eq!(v2(&unlimited), text(&[("cpu.max", "max 100000"), ("memory.max", "max")]));
        assert!(v2(&PodCgroup::default()).is_empty());
    }

    #[test]
    fn version_two_hands_controllers_down_and_names_what_is_missing() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path();
        let group = root.join("q/kubepods");
        fs::create_dir_all(&group).unwrap();
        for dir in [root, &root.join("q"), &group] {
            fs::write(dir.join("cgroup.controllers"), "cpu memory io pids\n").unwrap();
            fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
        }
        let cgroups = Cgroups::new(root, "/q", CgroupSettings::default());
        cgroups.make(Path::new("q/kubepods")).unwrap();
        let handed = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
        // In a plain file the last, and longest, of the single writes is what remains.
        assert_eq!(handed, "+pidsry");
        fs::write(group.join("cgroup.controllers"), "cpu\n").unwrap();
        assert_eq!(
            cgroups.make(Path::new("q/kubepods")).unwrap_err().to_string(),
            "cgroup \"/q/kubepods\" has some missing controllers: memory, pids"
        );
        fs::write(group.join("cpu.weight"), "").unwrap();
        let values = PodCgroup { cpu_shares: Some(1024), ..PodCgroup::default() };
        cgroups.write(Path::new("q/kubepods"), &values, None).unwrap();
        assert_eq!(fs::read_to_string(group.join("cpu.weight")).unwrap(), "39");
        for size in ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max", "hugetlb.1GB.max", "hugetlb.1GB.current"] {
            fs::write(group.join(size), "").unwrap();
        }
        let values = PodCgroup { hugepages: [("2Mi".to_owned(), 4 << 20)].into(), ..PodCgroup::default() };
        cgroups.write(Path::new("q/kubepods"), &values, Some(0)).unwrap();
        let read = |f: &str| fs::read_to_string(group.join(f)).unwrap();
        assert_eq!((read("hugetlb.2MB.max"), read("hugetlb.1GB.max")), ("4194304".into(), "0".into()));
        assert_eq!(
            (read("hugetlb.2MB.rsvd.max"), read("hugetlb.1GB.current")),
            ("4194304".into(), String::new())
        );
    }

    // The real hierarchies of this machine, below a group of the test's own.
    struct Real {
        cgroups: Cgroups,
        root: String,
    }

    impl Real {
        fn new(name: &str) -> Option<Self> {
            let mount = Path::new("/sys/fs/cgroup");
            let root = format!("/quintlet-test-{name}-{}", std::process::id());
            let cgroups =
                Cgroups::new(mount, &root, CgroupSettings { pids_limit: 50, ..CgroupSettings::default() });
            let writable = nix::unistd::geteuid().is_root() && !cgroups.mounts().is_empty();
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
            for mount in self.cgroups.mounts() {
                let _ = remove_dirs(&mount.join(self.root.trim_start_matches('/')));
            }
        }
    }

    #[tokio::test]
    async fn a_pods_group_lives_from_first_use_to_the_last_process() {
        let Some(real) = Real::new("life") else { return };
        let (id, cgroups) = (uid("u-1"), &real.cgroups);
        let limited = pod(json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}));
        assert!(!cgroups.exists(&limited, &id));
        cgroups.set_up(NodeLimits { memory_bytes: Some(1 << 30), ..NodeLimits::default() }).unwrap();
        cgroups.ensure(&limited, &id).unwrap();
        assert!(cgroups.exists(&limited, &id));
        assert_eq!(cgroups.parent(&limited, &id), format!("{}/kubepods/burstable/podu-1", real.root));
        assert_eq!(real.cpu("kubepods/burstable/podu-1"), 512);
        assert_eq!(real.cpu("kubepods/besteffort"), 2);
        let pids =
            fs::read_to_string(real.dir("pids", "kubepods/burstable/podu-1").join("pids.max")).unwrap();
        assert_eq!(pids.trim(), "50");

        cgroups.reduce_cpu(&id).unwrap();
        cgroups.ensure(&limited, &id).unwrap();
        assert_eq!(real.cpu("kubepods/burstable/podu-1"), 2, "a group that is there is not written again");
        cgroups.update_tiers(3000).unwrap();
        assert!(real.cpu("kubepods/burstable").abs_diff(3000) < 60);
        assert_eq!(cgroups.list().unwrap(), [id.clone()].into());

        let inner = real.dir("pids", "kubepods/burstable/podu-1/container");
        fs::create_dir(&inner).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        put(&inner.join("cgroup.procs"), &child.id().to_string()).unwrap();
        let reaped = std::thread::spawn(move || child.wait().unwrap());
        cgroups.remove_by_uid(&id).await.unwrap();
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(reaped.join().unwrap().signal(), Some(9));
        assert!(!cgroups.exists(&limited, &id));
        assert!(cgroups.list().unwrap().is_empty());
        cgroups.remove_by_uid(&id).await.unwrap();
    }

    #[test]
    fn a_group_missing_in_one_hierarchy_is_completed() {
        let Some(real) = Real::new("part") else { return };
        let best_effort = pod(json!({}));
        real.cgroups.ensure(&best_effort, &uid("u2")).unwrap();
        if let Layout::V1(_) = real.cgroups.layout {
            fs::remove_dir(real.dir("memory", "kubepods/besteffort/podu2")).unwrap();
            assert!(!real.cgroups.exists(&best_effort, &uid("u2")));
            real.cgroups.ensure(&best_effort, &uid("u2")).unwrap();
            let cpus =
                fs::read_to_string(real.dir("cpuset", "kubepods/besteffort/podu2").join("cpuset.cpus"));
            assert!(!cpus.unwrap().trim().is_empty(), "an empty cpuset runs nothing");
        }
        assert!(real.cgroups.exists(&best_effort, &uid("u2")));
    }
}
