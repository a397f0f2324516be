//! Control files of cgroups v1 and v2, and creation of the directories.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quintlet_model::qos::{self, CgroupState, PodCgroup};

use crate::error::{CgroupError, io_error};

// From this value on, the kernel treats a limit as none. v1 rounds limits to pages.
pub(crate) const UNLIMITED: i64 = 1 << 62;
// v2: controllers that are enabled for descendants if the root has them.
pub(crate) const V2_CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "hugetlb", "pids"];

/// Returns whether `root` is a cgroup v2 mount.
#[must_use]
pub fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// The CPUs of a cgroup.
pub(super) const CPUS: &str = "cpuset.cpus";

pub(super) fn page_size_is(resource: &str, file: &str) -> bool {
    quintlet_model::quantity::Quantity::parse(resource)
        .ok()
        .and_then(|q| u64::try_from(q.value()).ok())
        .is_some_and(|bytes| qos::page_size_name(bytes) == file)
}

pub(super) fn v1_files(values: &PodCgroup) -> Vec<(&'static str, &'static str, String)> {
    // The period is written first, since the kernel checks the quota against it.
    [
        ("cpu", "cpu.shares", values.cpu_shares.map(|v| v.to_string())),
        ("cpu", "cpu.cfs_period_us", values.cpu_period_us.map(|v| v.to_string())),
        ("cpu", "cpu.cfs_quota_us", values.cpu_quota_us.map(|v| v.to_string())),
        ("memory", "memory.limit_in_bytes", values.memory_bytes.map(|v| v.to_string())),
        ("pids", "pids.max", values.pids.map(limit)),
        ("cpuset", CPUS, values.cpus.as_ref().map(ToString::to_string)),
    ]
    .into_iter()
    .filter_map(|(controller, file, value)| Some((controller, file, value?)))
    .collect()
}

pub(super) fn v2_files(values: &PodCgroup) -> Vec<(&'static str, String)> {
    let period = values.cpu_period_us.unwrap_or(qos::DEFAULT_PERIOD_US);
    [
        ("cpu.weight", values.cpu_shares.map(|v| qos::shares_to_weight(v).to_string())),
        ("cpu.max", values.cpu_quota_us.map(|quota| format!("{} {period}", limit(quota)))),
        ("memory.min", values.memory_min.map(|v| v.to_string())),
        ("memory.low", values.memory_low.map(|v| v.to_string())),
        ("memory.max", values.memory_bytes.map(limit)),
        ("pids.max", values.pids.map(limit)),
        (CPUS, values.cpus.as_ref().map(ToString::to_string)),
    ]
    .into_iter()
    .filter_map(|(file, value)| Some((file, value?)))
    .collect()
}

fn number(path: &Path) -> Result<i64, CgroupError> {
    let text = fs::read_to_string(path).map_err(io_error("cannot read", path))?;
    parse(&text, path)
}

fn parse(text: &str, path: &Path) -> Result<i64, CgroupError> {
    match text.trim() {
        "max" => Ok(-1),
        number => {
            let bad = |e| io_error("cannot read", path)(io::Error::new(io::ErrorKind::InvalidData, e));
            number.parse::<i64>().map_err(bad)
        }
    }
}

pub(super) fn current_v1(dir: impl Fn(&str) -> Option<PathBuf>) -> Result<CgroupState, CgroupError> {
    let mut now = CgroupState::default();
    if let Some(cpu) = dir("cpu") {
        now.cpu_shares = u64::try_from(number(&cpu.join("cpu.shares"))?).unwrap_or(0);
        // The kernel may be built without CFS quotas.
        let quota = cpu.join("cpu.cfs_quota_us");
        now.cpu_quota_us = if quota.exists() { Some(number(&quota)?).filter(|q| *q > 0) } else { None };
    }
    if let Some(memory) = dir("memory") {
        now.memory_limit =
            Some(number(&memory.join("memory.limit_in_bytes"))?).filter(|limit| *limit < UNLIMITED);
        now.memory_usage = number(&memory.join("memory.usage_in_bytes"))?;
    }
    Ok(now)
}

pub(super) fn current_v2(dir: &Path) -> Result<CgroupState, CgroupError> {
    let mut now = CgroupState::default();
    let weight = dir.join("cpu.weight");
    if weight.exists() {
        now.cpu_shares = qos::weight_to_shares(u64::try_from(number(&weight)?).unwrap_or(0));
        let max = dir.join("cpu.max");
        let text = fs::read_to_string(&max).map_err(io_error("cannot read", &max))?;
        let quota = text.split_whitespace().next().unwrap_or("max");
        now.cpu_quota_us = Some(parse(quota, &max)?).filter(|q| *q > 0);
    }
    let limit = dir.join("memory.max");
    if limit.exists() {
        now.memory_limit = Some(number(&limit)?).filter(|l| *l >= 0);
        now.memory_usage = number(&dir.join("memory.current"))?;
        // A protection of all memory reads as -1.
        let protected =
            |file: &str| number(&dir.join(file)).map(|bytes| if bytes < 0 { i64::MAX } else { bytes });
        now.memory_protected = Some(protected("memory.min")?.max(protected("memory.low")?));
    }
    Ok(now)
}

pub(super) fn limit(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

// Never creates the file: if it does not exist, the controller is not available.
pub(super) fn put(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

pub(super) fn mkdir(dir: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io_error("cannot create", dir)(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Creates a directory, unless it exists. Returns false if it has no parent.
pub(super) fn mkdir_below(dir: &Path) -> Result<bool, CgroupError> {
    match fs::create_dir(dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io_error("cannot create", dir)(e)),
    }
}

/// Copies CPUs and memory nodes from the parent to an empty cpuset. A new one is empty, and no process can
/// join it.
pub(super) fn fill_cpuset(dir: &Path) -> Result<(), CgroupError> {
    for file in [CPUS, "cpuset.mems"] {
        let own = dir.join(file);
        if fs::read_to_string(&own).is_ok_and(|v| v.trim().is_empty()) {
            let parent = dir.parent().unwrap_or(dir);
            let above = fs::read_to_string(parent.join(file)).map_err(io_error("cannot read", parent))?;
            put(&own, above.trim()).map_err(io_error("cannot write", &own))?;
        }
    }
    Ok(())
}

pub(super) fn make_v1(mount: &Path, group: &Path, cpuset: bool) -> Result<(), CgroupError> {
    let mut dir = mount.to_owned();
    for part in group {
        dir.push(part);
        mkdir(&dir)?;
        if cpuset {
            fill_cpuset(&dir)?;
        }
    }
    Ok(())
}

pub(super) fn make_v2(root: &Path, group: &Path) -> Result<(), CgroupError> {
    let mut dir = root.to_owned();
    for part in group {
        let has = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
        for controller in V2_CONTROLLERS.iter().filter(|c| has.split_whitespace().any(|h| h == **c)) {
            // Each controller is enabled on its own, so that an unavailable one does not prevent the others.
            // Those missing at the end of the path are the error.
            if let Err(e) = put(&dir.join("cgroup.subtree_control"), &format!("+{controller}")) {
                tracing::debug!(path = %dir.display(), controller, error = %e, "failed to enable controller for descendants");
            }
        }
        dir.push(part);
        mkdir(&dir)?;
    }
    Ok(())
}
