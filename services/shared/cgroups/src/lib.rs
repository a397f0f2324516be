//! Creates, limits and removes cgroups of pods, v1 and v2, with the cgroupfs and the systemd driver
//! (`pkg/kubelet/cm`), and reads their statistics ([`stats`]).
//!
//! The crate writes the control files itself and does not use `cgroups-rs`: that takes the hierarchies from
//! the mount table of the process, so tests and a second root cannot redirect it, and it fails if a
//! controller is missing, which is usual with v1. With the systemd driver the cgroups are slices
//! ([`parent_name`]), which systemd starts, limits and stops (`systemd.rs`); the same values are then written
//! to the files, as in the kubelet.
//!
//! All functions block for a short time, except [`Cgroups::remove_by_uid`], which waits for killed processes
//! on a thread of its own.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod error;
mod files;
mod names;
mod owner_mark;
mod processes;
mod removal;
pub mod stats;
mod systemd;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::Pod;
use quintlet_kit::failpoint;
use quintlet_model::cpu_list::CpuList;
use quintlet_model::ids::PodUid;
use quintlet_model::qos::{self, CgroupSettings, CgroupState, PodCgroup, QosClass, QosTiers};

use self::error::io_error;
use self::files::{
    CPUS, UNLIMITED, V2_CONTROLLERS, current_v1, current_v2, fill_cpuset, make_v1, make_v2, mkdir_below,
    page_size_is, put, v1_files, v2_files,
};
use self::names::{BESTEFFORT, BURSTABLE, KUBEPODS};
use self::removal::{kill_all, remove_dirs};
use self::systemd::Systemd;

pub use self::error::{CgroupError, SystemdError};
pub use self::files::is_v2;
pub use self::names::{CgroupDriver, parent_name};
pub use self::processes::is_kernel_thread;

const MIN_SHARES: u64 = 2;
// v1: a pod's cgroup must exist in these controllers if they are mounted.
const V1_REQUIRED: [&str; 7] = ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd", "hugetlb"];
// v1: the v2 hierarchy of a hybrid system. It has no controllers, and the runtime ignores it as well.
const UNIFIED: &str = "unified";

/// Returns whether cgroups v2 have a swap limit, judged by the cgroup of this process.
#[must_use]
pub fn has_swap_controller() -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().find_map(|l| l.strip_prefix("0::")).is_some_and(|own| {
        Path::new("/sys/fs/cgroup").join(own.trim_start_matches('/')).join("memory.swap.max").exists()
    })
}

/// Limits of `kubepods`, the cgroup of all pods. `None` leaves a value unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KubepodsLimits {
    /// Millicores.
    pub cpu_milli: Option<i64>,
    /// Limit of memory in bytes, if any.
    pub memory_bytes: Option<i64>,
    /// Number of processes.
    pub pids: Option<i64>,
}

#[derive(Debug, Clone)]
enum Layout {
    /// v1: mount points by controller. Several controllers may share one.
    V1(BTreeMap<String, PathBuf>),
    V2(PathBuf),
}

impl Layout {
    fn hierarchies(&self) -> Arc<[PathBuf]> {
        match self {
            Self::V2(root) => [root.clone()].into(),
            Self::V1(controllers) => {
                let mut seen = BTreeSet::new();
                let real = |p: &Path| fs::canonicalize(p).unwrap_or_else(|_| p.to_owned());
                controllers.values().filter(|p| seen.insert(real(p))).cloned().collect()
            }
        }
    }
}

/// The cgroups of this node's pods.
#[derive(Debug, Clone)]
pub struct Cgroups {
    layout: Layout,
    // Each hierarchy once, even if several controllers share it.
    hierarchies: Arc<[PathBuf]>,
    root: String,
    settings: CgroupSettings,
    // Set once the runtime reports its driver; shared by all clones.
    is_systemd: Arc<AtomicBool>,
    systemd: Systemd,
    /// `cgroupsPerQOS`. Without it pods have no cgroups.
    with_cgroups_per_qos: bool,
    // Owner attribute of the cgroups of pods.
    owner: String,
}

impl Cgroups {
    /// Uses the hierarchies mounted at `mount` (`/sys/fs/cgroup`), below the cgroup `root` (`--cgroup-root`).
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
        let systemd = Systemd::new(None, matches!(layout, Layout::V2(_)));
        Self {
            hierarchies: layout.hierarchies(),
            layout,
            root: root.to_owned(),
            settings,
            is_systemd: Arc::default(),
            systemd,
            with_cgroups_per_qos: true,
            owner: String::new(),
        }
    }

    /// Marks cgroups of pods as created by `owner`, to distinguish them from those of another node agent
    /// under the same root.
    #[must_use]
    pub fn with_owner(self, owner: &str) -> Self {
        Self { owner: owner.to_owned(), ..self }
    }

    /// Uses another address of the system bus than the default.
    #[must_use]
    pub fn with_system_bus(self, address: Option<String>) -> Self {
        let systemd = Systemd::new(address, matches!(self.layout, Layout::V2(_)));
        Self { systemd, ..self }
    }

    /// Returns whether there are QoS cgroups and a cgroup of all pods.
    #[must_use]
    pub fn has_qos_cgroups(&self) -> bool {
        self.with_cgroups_per_qos
    }

    /// Enables or disables cgroups of pods (`cgroupsPerQOS`).
    #[must_use]
    pub fn with_cgroups_per_qos(self, with_cgroups_per_qos: bool) -> Self {
        Self { with_cgroups_per_qos, ..self }
    }

    /// Returns the same cgroups without CPU quotas, for pods with exclusive CPUs.
    #[must_use]
    pub fn without_quota(&self) -> Self {
        let settings = CgroupSettings { cfs_quota: false, ..self.settings };
        Self { settings, ..self.clone() }
    }

    /// Returns the driver for new cgroups.
    #[must_use]
    pub fn driver(&self) -> CgroupDriver {
        if self.is_systemd.load(Ordering::Relaxed) { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs }
    }

    /// Sets the driver for new cgroups. Returns whether it changed.
    pub fn set_driver(&self, driver: CgroupDriver) -> bool {
        let systemd = driver == CgroupDriver::Systemd;
        self.is_systemd.swap(systemd, Ordering::Relaxed) != systemd
    }

    /// Returns the pod's `cgroup_parent` for the CRI; empty if pods have no cgroups.
    #[must_use]
    pub fn pod_cgroup_parent(&self, pod: &Pod, uid: &PodUid) -> String {
        if !self.with_cgroups_per_qos {
            return String::new();
        }
        parent_name(self.driver(), &self.root, qos::qos_class(pod), uid)
    }

    /// Returns whether a `cgroup_parent` is that of a pod of this node, of any QoS class. A name of systemd
    /// may be that of the slice alone.
    #[must_use]
    pub fn is_parent_of(&self, parent: &str, uid: &PodUid) -> bool {
        let driver = self.driver();
        self.with_cgroups_per_qos
            && [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort].into_iter().any(|class| {
                let own = parent_name(driver, &self.root, class, uid);
                own == parent || driver == CgroupDriver::Systemd && own.rsplit('/').next() == Some(parent)
            })
    }

    /// Creates `kubepods` and the QoS cgroups, and limits all pods together. Existing cgroups are updated.
    /// All pods may use `cpus`, which are those of the machine (`pkg/kubelet/cm: getCgroupConfig`): systemd
    /// disables the controller `cpuset` in a slice that has no CPUs of its own.
    ///
    /// # Errors
    /// A cgroup cannot be created or written.
    pub fn set_up_kubepods(&self, limits: KubepodsLimits, cpus: &CpuList) -> Result<(), CgroupError> {
        if !self.with_cgroups_per_qos {
            return Ok(());
        }
        for class in [QosClass::Burstable, QosClass::BestEffort] {
            self.make_tier(class)?;
        }
        let values = PodCgroup {
            cpu_shares: limits.cpu_milli.map(qos::milli_to_shares),
            memory_bytes: limits.memory_bytes,
            pids: limits.pids,
            cpus: Some(cpus.clone()),
            ..PodCgroup::default()
        };
        self.write(&self.below_root(&[KUBEPODS]), &values, None)
    }

    /// Writes the values of the cgroups of QoS classes. A limit of memory below the memory in use becomes the
    /// memory in use: it prevents growth and ends no process (`pkg/kubelet/cm: retrySetMemoryReserve`).
    ///
    /// # Errors
    /// A cgroup cannot be created or written.
    pub fn update_qos_cgroups(&self, tiers: &QosTiers) -> Result<(), CgroupError> {
        if !self.with_cgroups_per_qos {
            return Ok(());
        }
        self.make_tier(QosClass::Burstable)?;
        self.make_tier(QosClass::BestEffort)?;
        if tiers.memory_min.is_some() {
            let protection = PodCgroup { memory_min: tiers.memory_min, ..PodCgroup::default() };
            self.write(&self.below_root(&[KUBEPODS]), &protection, None)?;
        }
        for (name, shares, memory, memory_low) in [
            (BURSTABLE, tiers.burstable_shares, tiers.burstable_memory, tiers.memory_low),
            (BESTEFFORT, MIN_SHARES, tiers.best_effort_memory, None),
        ] {
            let group = self.below_root(&[KUBEPODS, name]);
            let memory_bytes = memory.map(|limit| limit.max(self.memory_usage(&group)));
            let values =
                PodCgroup { cpu_shares: Some(shares), memory_bytes, memory_low, ..PodCgroup::default() };
            self.write(&group, &values, Some(UNLIMITED))?;
        }
        Ok(())
    }

    /// Returns the memory that a cgroup uses, in bytes; 0 if it cannot be read.
    fn memory_usage(&self, group: &[String]) -> i64 {
        let place = self.place(group);
        let file = match &self.layout {
            Layout::V1(controllers) => {
                controllers.get("memory").map(|mount| mount.join(place).join("memory.usage_in_bytes"))
            }
            Layout::V2(root) => Some(root.join(place).join("memory.current")),
        };
        let text = file.and_then(|file| fs::read_to_string(file).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Writes values of an existing cgroup, named as in `systemReservedCgroup`: a path from the root of the
    /// hierarchies, or a slice. Huge pages are limited to 0 (`pkg/kubelet/cm: enforceExistingCgroup`).
    ///
    /// # Errors
    /// The cgroup does not exist, lacks a controller, or a value cannot be written.
    pub fn limit_existing(&self, name: &str, values: &PodCgroup) -> Result<(), CgroupError> {
        let group = names::parse(self.driver(), name);
        self.validate(&group)?;
        self.write(&group, values, Some(0))
    }

    /// Fails unless the cgroup exists (`pkg/kubelet/cm: Validate`).
    fn validate(&self, group: &[String]) -> Result<(), CgroupError> {
        let place = self.place(group);
        match &self.layout {
            Layout::V1(controllers) => {
                let dirs = V1_REQUIRED.iter().filter_map(|c| Some(controllers.get(*c)?.join(&place)));
                let missing: Vec<_> = dirs.filter(|dir| !dir.is_dir()).collect();
                if missing.is_empty() {
                    return Ok(());
                }
                let missing = missing.iter().map(|dir| dir.display().to_string()).collect();
                Err(CgroupError::MissingPaths { group: group.to_vec(), missing })
            }
            Layout::V2(root) => {
                let controllers = root.join(&place).join("cgroup.controllers");
                fs::metadata(&controllers).map_err(io_error("could not read controllers", &controllers))?;
                let missing = self.missing(group);
                if missing.is_empty() {
                    return Ok(());
                }
                Err(CgroupError::Missing { group: format!("/{}", place.display()), missing })
            }
        }
    }

    /// Returns whether the pod's cgroup exists in every required hierarchy, or is not needed.
    #[must_use]
    pub fn exists(&self, pod: &Pod, uid: &PodUid) -> bool {
        !self.with_cgroups_per_qos || self.missing(&self.group(pod, uid)).is_empty()
    }

    /// Creates the pod's cgroup with its values. An existing one is not changed.
    ///
    /// # Errors
    /// The caller adds the prefix `unable to ensure pod container exists: `.
    pub fn ensure(&self, pod: &Pod, uid: &PodUid) -> Result<(), CgroupError> {
        if self.exists(pod, uid) { Ok(()) } else { self.ensure_with_values(pod, uid) }
    }

    /// Like [`Cgroups::ensure`], but also writes the values of an existing cgroup, which may have been
    /// created without them.
    ///
    /// # Errors
    /// As for [`Cgroups::ensure`].
    pub fn ensure_with_values(&self, pod: &Pod, uid: &PodUid) -> Result<(), CgroupError> {
        if !self.with_cgroups_per_qos {
            return Ok(());
        }
        let group = self.group(pod, uid);
        failpoint::file!("cgroup made", || self.make_pod(&group, qos::qos_class(pod)))?;
        failpoint::file!("cgroup limited", || self.write(&group, &self.pod_values(pod), Some(0)))
    }

    /// Returns the values of the pod's cgroup; all `None` if pods have no cgroups.
    #[must_use]
    pub fn pod_values(&self, pod: &Pod) -> PodCgroup {
        if !self.with_cgroups_per_qos {
            return PodCgroup::default();
        }
        qos::pod_cgroup(pod, self.settings)
    }

    /// Writes values of a pod's existing cgroup. Those that are `None` stay.
    ///
    /// # Errors
    /// A value cannot be written.
    pub fn set_values(&self, pod: &Pod, uid: &PodUid, values: &PodCgroup) -> Result<(), CgroupError> {
        self.write(&self.group(pod, uid), values, None)
    }

    /// Reads the current values that a resize depends on. A controller that is not mounted has no limit.
    ///
    /// # Errors
    /// A value cannot be read.
    pub fn current_values(&self, pod: &Pod, uid: &PodUid) -> Result<CgroupState, CgroupError> {
        if !self.with_cgroups_per_qos {
            return Ok(CgroupState::default());
        }
        let group = self.place(&self.group(pod, uid));
        match &self.layout {
            Layout::V1(controllers) => {
                current_v1(|controller| Some(controllers.get(controller)?.join(&group)))
            }
            Layout::V2(root) => current_v2(&root.join(&group)),
        }
    }

    /// Returns the UIDs of all pods that have a cgroup in any hierarchy.
    ///
    /// # Errors
    /// A hierarchy cannot be read.
    pub fn pods(&self) -> Result<BTreeSet<PodUid>, CgroupError> {
        let mut out = BTreeSet::new();
        for mount in self.hierarchies.iter() {
            for parent in self.pod_parents() {
                let dir = mount.join(self.place(&parent));
                let entries = match fs::read_dir(&dir) {
                    Ok(entries) => entries,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    Err(e) => return Err(io_error("cannot read", &dir)(e)),
                };
                out.extend(entries.flatten().filter_map(|e| {
                    let name = e.file_name();
                    names::uid_of(self.driver(), name.to_str()?).filter(|_| e.path().is_dir())
                }));
            }
        }
        Ok(out)
    }

    /// Returns the UIDs of pods that have a cgroup with this owner's mark, except the `known` ones.
    #[must_use]
    pub fn owned_pods(&self, known: &HashSet<PodUid>) -> BTreeSet<PodUid> {
        let driver = self.driver();
        let parents = self.pod_parents().into_iter().flat_map(|parent| self.dirs(&parent));
        let entries = parents.flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
        entries
            .filter_map(|e| {
                let name = e.file_name();
                let name = name.to_str()?;
                // Most names are those of known pods, which are not parsed.
                if name.strip_prefix("pod").is_some_and(|uid| known.contains(uid)) {
                    return None;
                }
                let uid = names::uid_of(driver, name).filter(|uid| !known.contains(uid))?;
                owner_mark::is(&e.path(), &self.owner).then_some(uid)
            })
            .collect()
    }

    /// Returns the existing directories of a cgroup.
    fn dirs(&self, group: &[String]) -> Vec<PathBuf> {
        let place = self.place(group);
        self.hierarchies.iter().map(|m| m.join(&place)).filter(|d| d.is_dir()).collect()
    }

    /// Sets the least CPU shares for a deleted pod whose volumes still exist
    /// (`pkg/kubelet/cm: ReduceCPULimits`).
    ///
    /// # Errors
    /// A value cannot be written.
    pub fn reduce_cpu_limits(&self, uid: &PodUid) -> Result<(), CgroupError> {
        let values = PodCgroup { cpu_shares: Some(MIN_SHARES), ..PodCgroup::default() };
        for parent in self.pod_parents() {
            let group = [parent, vec![format!("pod{uid}")]].concat();
            if !self.dirs(&group).is_empty() {
                self.write(&group, &values, None)?;
            }
        }
        Ok(())
    }

    /// Kills every process of the pod's cgroups of all QoS classes, and removes the cgroups. It is not an
    /// error if there are none.
    ///
    /// # Errors
    /// Processes or cgroups remain after all attempts. It may be called again.
    pub async fn remove_by_uid(&self, uid: &PodUid) -> Result<(), CgroupError> {
        let (cgroups, pod) = (self.clone(), uid.clone());
        quintlet_kit::task::blocking(move || cgroups.remove(&pod)).await
    }

    fn remove(&self, uid: &PodUid) -> Result<(), CgroupError> {
        for parent in self.pod_parents() {
            let group = [parent, vec![format!("pod{uid}")]].concat();
            let dirs = match self.driver() {
                CgroupDriver::Cgroupfs => self.remove_empty(&group),
                CgroupDriver::Systemd => self.dirs(&group),
            };
            if dirs.is_empty() {
                continue;
            }
            let name = format!("/{}", self.place(&group).display());
            kill_all(&name, &dirs)?;
            if self.driver() == CgroupDriver::Systemd {
                self.systemd.stop(&names::slice(&group))?;
            }
            for dir in &dirs {
                failpoint::file!("cgroup removed", || remove_dirs(dir))
                    .map_err(|source| CgroupError::Delete { group: name.clone(), source })?;
            }
        }
        Ok(())
    }

    /// Removes the directories of a cgroup that have no processes and no descendants, which the kernel does
    /// at once. Returns the others.
    fn remove_empty(&self, group: &[String]) -> Vec<PathBuf> {
        let place = self.place(group);
        let dirs = self.hierarchies.iter().map(|mount| mount.join(&place));
        let is_left = |dir: &PathBuf| match fs::remove_dir(dir) {
            Ok(()) => {
                // Only for a directory that existed: a pod has one in one of three places.
                failpoint::file!("cgroup removed", || ());
                false
            }
            Err(e) => e.kind() != io::ErrorKind::NotFound,
        };
        dirs.filter(is_left).collect()
    }

    fn group(&self, pod: &Pod, uid: &PodUid) -> Vec<String> {
        names::components(&self.root, qos::qos_class(pod), uid.as_str())
    }

    fn below_root(&self, parts: &[&str]) -> Vec<String> {
        names::below_root(&self.root, parts)
    }

    fn place(&self, group: &[String]) -> PathBuf {
        names::path(self.driver(), group)
    }

    fn pod_parents(&self) -> [Vec<String>; 3] {
        [
            self.below_root(&[KUBEPODS]),
            self.below_root(&[KUBEPODS, BURSTABLE]),
            self.below_root(&[KUBEPODS, BESTEFFORT]),
        ]
    }

    fn missing(&self, group: &[String]) -> Vec<String> {
        let group = &self.place(group);
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

    /// Creates a pod's cgroup with the owner's mark. The cgroups above it exist, unless this is the first pod
    /// of its QoS class or someone has removed them, so they are not looked at before that is known.
    fn make_pod(&self, group: &[String], class: QosClass) -> Result<(), CgroupError> {
        if self.driver() == CgroupDriver::Systemd || !self.make_below_tier(group)? {
            self.make_tier(class)?;
            self.make(group)?;
        }
        let place = self.place(group);
        self.hierarchies.iter().for_each(|mount| owner_mark::set(&mount.join(&place), &self.owner));
        Ok(())
    }

    /// Creates a cgroup in each hierarchy, unless it exists. Returns false if the cgroup above it is missing,
    /// or lacks a controller.
    fn make_below_tier(&self, group: &[String]) -> Result<bool, CgroupError> {
        let place = self.place(group);
        match &self.layout {
            Layout::V1(controllers) => {
                for (name, mount) in controllers.iter().filter(|(name, _)| *name != UNIFIED) {
                    let dir = mount.join(&place);
                    if !mkdir_below(&dir)? {
                        return Ok(false);
                    }
                    if name.contains("cpuset") {
                        fill_cpuset(&dir)?;
                    }
                }
                Ok(true)
            }
            Layout::V2(root) => Ok(mkdir_below(&root.join(&place))? && self.missing(group).is_empty()),
        }
    }

    fn make_tier(&self, class: QosClass) -> Result<(), CgroupError> {
        self.make(&self.below_root(&[KUBEPODS]))?;
        let Some(name) = names::qos_cgroup(class) else { return Ok(()) };
        let group = self.below_root(&[KUBEPODS, name]);
        if self.missing(&group).is_empty() {
            return Ok(());
        }
        self.make(&group)?;
        let shares = (class == QosClass::BestEffort).then_some(MIN_SHARES);
        self.write(&group, &PodCgroup { cpu_shares: shares, ..PodCgroup::default() }, Some(UNLIMITED))
    }

    fn make(&self, group: &[String]) -> Result<(), CgroupError> {
        if self.driver() == CgroupDriver::Systemd {
            self.systemd.start(&names::slice(group))?;
        }
        let place = &self.place(group);
        match &self.layout {
            Layout::V1(controllers) => {
                for (name, mount) in controllers {
                    if name != UNIFIED {
                        make_v1(mount, place, name.contains("cpuset"))?;
                    }
                }
            }
            Layout::V2(root) => make_v2(root, place)?,
        }
        let missing = self.missing(group);
        if missing.is_empty() {
            return Ok(());
        }
        Err(CgroupError::Missing { group: format!("/{}", place.display()), missing })
    }

    /// Returns the CPUs that a cgroup accepts: with v1 those of its parent only. `None` if there are none, or
    /// no controller.
    fn accepted_cpus(&self, group: &[String], cpus: &CpuList) -> Option<CpuList> {
        let place = self.place(group);
        let accepted = match &self.layout {
            Layout::V1(controllers) => {
                let parent = controllers.get("cpuset")?.join(place.parent()?);
                let of_parent = fs::read_to_string(parent.join(CPUS)).ok()?;
                cpus.intersection(&CpuList::parse(&of_parent).ok()?)
            }
            Layout::V2(root) => root.join(&place).join(CPUS).exists().then(|| cpus.clone())?,
        };
        (accepted.count() > 0).then_some(accepted)
    }

    /// Writes values. Controllers that are not mounted are skipped. Page sizes without a value get
    /// `hugepages`.
    fn write(&self, group: &[String], values: &PodCgroup, hugepages: Option<i64>) -> Result<(), CgroupError> {
        let cpus = values.cpus.as_ref().and_then(|cpus| self.accepted_cpus(group, cpus));
        let values = &PodCgroup { cpus, ..values.clone() };
        if self.driver() == CgroupDriver::Systemd {
            self.systemd.set(&names::slice(group), values)?;
        }
        let group = &self.place(group);
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
            // v1 also has `2MB.rsvd`, which the kubelet does not set.
            if size.contains('.') {
                continue;
            }
            let wanted = values.hugepages.iter().find(|(k, _)| page_size_is(k, size)).map(|(_, v)| *v);
            let path = entry.path();
            put(&path, &wanted.unwrap_or(default).to_string()).map_err(io_error("cannot write", &path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
