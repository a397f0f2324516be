//! Project quotas that count the disk usage of emptyDir volumes (`pkg/volume/util/fsquota`, feature gate
//! `LocalStorageCapacityIsolationFSQuotaMonitoring`).
//!
//! A project counts files that were deleted and are still open, and needs no walk. Nothing is limited. A
//! volume has a project if its pod has a user namespace, in which containers cannot change projects, and if
//! the file system counts projects. Otherwise it is measured by a walk. IDs are in `/etc/projects` and
//! `/etc/projid`, where a restarted pod-sync finds them.

mod files;
mod interface;
mod projects;
mod tool;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use quintlet_model::pod;

pub use interface::{Mount, QuotaTool, QuotaUsage};

use files::ProjectFiles;
use tool::Tools;

/// File systems with projects.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];

/// The projects of volumes. Clones share them. The default has none, and volumes are walked.
#[derive(Clone, Default)]
pub struct ProjectQuotas(Option<Arc<Inner>>);

struct Inner {
    /// Parent of the directories of pods.
    pods_dir: PathBuf,
    files: ProjectFiles,
    /// `/proc/self/mounts`.
    mounts: PathBuf,
    tool: Box<dyn QuotaTool>,
    /// Held while a command runs, so that an ID is not given to another directory meanwhile.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    projects: HashMap<PathBuf, Project>,
    /// Whether a file system counts projects, by its line in the mount table.
    has_accounting: HashMap<String, bool>,
}

#[derive(Debug, Clone)]
struct Project {
    id: u32,
    mount: Mount,
}

impl std::fmt::Debug for ProjectQuotas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ProjectQuotas").field(&self.0.is_some()).finish()
    }
}

impl ProjectQuotas {
    /// Returns the projects of volumes below `root`, the kubelet's root directory.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self::with_tool(root, Path::new("/etc"), PathBuf::from("/proc/self/mounts"), Box::new(Tools::find()))
    }

    /// Like [`ProjectQuotas::new`], with other files and another tool. `mounts` has the form of
    /// `/proc/self/mounts`.
    #[must_use]
    pub fn with_tool(root: &Path, etc: &Path, mounts: PathBuf, tool: Box<dyn QuotaTool>) -> Self {
        let files = ProjectFiles::below(etc);
        let inner = Inner { pods_dir: root.join("pods"), files, mounts, tool, state: Mutex::default() };
        Self(Some(Arc::new(inner)))
    }

    /// Returns whether the volumes of a pod may have projects: only root may change the project of a file in
    /// a user namespace.
    pub(crate) fn applies_to(&self, pod: &Pod) -> bool {
        self.0.is_some() && pod::spec(pod).host_users == Some(false)
    }

    /// Assigns a project to the directory of a new volume, which no container has used. Blocks. A volume
    /// without a project is walked, so a failure is only logged.
    pub fn assign(&self, dir: &Path) {
        let Some(inner) = &self.0 else { return };
        match inner.assign(dir) {
            Ok(Some(id)) => tracing::debug!(dir = %dir.display(), id, "assigned project to volume"),
            Ok(None) => {}
            Err(error) => {
                tracing::info!(dir = %dir.display(), %error, "failed to assign a project to a volume, it is measured by walking it");
            }
        }
    }

    /// Returns the usage of a volume, or `None` if it has no project or cannot be measured so. Blocks.
    #[must_use]
    pub fn usage(&self, dir: &Path) -> Option<QuotaUsage> {
        let inner = self.0.as_ref().filter(|_| is_empty_dir(dir))?;
        inner
            .usage(dir)
            .inspect_err(|error| tracing::debug!(dir = %dir.display(), %error, "failed to read the usage of a project"))
            .ok()?
    }

    /// Releases the projects of the removed volumes of a pod. Blocks. What remains after a failure is
    /// released with the next assignment.
    pub(crate) fn release(&self, pod_dir: &Path) {
        let Some(inner) = &self.0 else { return };
        if let Err(error) = inner.release(pod_dir) {
            tracing::info!(dir = %pod_dir.display(), %error, "failed to release the projects of a pod");
        }
    }
}

impl Inner {
    fn assign(&self, dir: &Path) -> io::Result<Option<u32>> {
        let mut state = self.state.lock();
        let Some(mount) = self.mount_with_projects(&mut state, dir)? else { return Ok(None) };
        let is_used = |id| self.tool.usage(&mount, id).is_ok_and(|usage| usage != QuotaUsage::default());
        // Without an answer no ID is known to be free.
        self.tool.usage(&mount, projects::FIRST_ID)?;
        let assigned = self.files.update(|projects| {
            // A directory of this name existed before, or an earlier process ended here.
            projects.remove(|listed| listed == dir || self.is_leftover(listed));
            projects.assign(dir, is_used)
        })?;
        let id = assigned.ok_or_else(|| io::Error::other("cannot find available quota ID"))?;
        if let Err(error) = self.tool.set_project(&mount, dir, id) {
            self.files.update(|projects| projects.remove(|listed| listed == dir).then_some(()))?;
            return Err(error);
        }
        state.projects.insert(dir.to_owned(), Project { id, mount });
        Ok(Some(id))
    }

    fn usage(&self, dir: &Path) -> io::Result<Option<QuotaUsage>> {
        let mut state = self.state.lock();
        let project = match state.projects.get(dir) {
            Some(known) => known.clone(),
            // An earlier process may have assigned it.
            None => match self.find(&mut state, dir)? {
                Some(found) => {
                    state.projects.insert(dir.to_owned(), found.clone());
                    found
                }
                None => return Ok(None),
            },
        };
        self.tool.usage(&project.mount, project.id).map(Some)
    }

    /// Returns the project of a directory if the list and the file system agree on it.
    fn find(&self, state: &mut State, dir: &Path) -> io::Result<Option<Project>> {
        let Some(id) = self.files.read()?.id_of(dir).filter(|id| *id >= projects::FIRST_ID) else {
            return Ok(None);
        };
        let Some(mount) = self.mount_with_projects(state, dir)? else { return Ok(None) };
        let is_same = self.tool.project_of(dir)? == id;
        Ok(is_same.then_some(Project { id, mount }))
    }

    fn release(&self, pod_dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        state.projects.retain(|dir, _| !dir.starts_with(pod_dir));
        let is_released = |listed: &Path| listed.starts_with(pod_dir) && self.is_leftover(listed);
        if self.files.read()?.remove(is_released) {
            self.files.update(|projects| projects.remove(is_released).then_some(()))?;
        }
        Ok(())
    }

    /// Returns whether a listed directory belonged to a volume that was removed.
    fn is_leftover(&self, listed: &Path) -> bool {
        listed.starts_with(&self.pods_dir)
            && std::fs::symlink_metadata(listed).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    }

    /// Returns the mount of a directory if its file system counts the usage of projects.
    fn mount_with_projects(&self, state: &mut State, dir: &Path) -> io::Result<Option<Mount>> {
        // The tool splits its subcommands at blanks.
        let is_plain =
            dir.to_str().is_some_and(|dir| !dir.contains(|c: char| c.is_whitespace() || "\"'\\".contains(c)));
        if !is_plain {
            return Ok(None);
        }
        let table = std::fs::read_to_string(&self.mounts)?;
        let Some(mount) = mount_of(&table, &dir.canonicalize()?) else { return Ok(None) };
        if !FILE_SYSTEMS.contains(&mount.fs_type.as_str()) {
            return Ok(None);
        }
        let has_accounting = match state.has_accounting.get(&mount.line) {
            Some(known) => *known,
            None => {
                let has = self.tool.has_accounting(&mount)?;
                // The lines of other mounts are those of the past.
                state.has_accounting.retain(|line, _| table.lines().any(|l| l == line));
                state.has_accounting.insert(mount.line.clone(), has);
                has
            }
        };
        Ok(has_accounting.then_some(mount))
    }
}

/// Returns whether a directory is that of an emptyDir volume. Others have no project.
fn is_empty_dir(dir: &Path) -> bool {
    dir.parent().is_some_and(|plugin| plugin.ends_with("kubernetes.io~empty-dir"))
}

/// Returns the mount that a path without links is on. `table` is `/proc/self/mounts`; a later mount hides an
/// earlier one.
fn mount_of(table: &str, path: &Path) -> Option<Mount> {
    let mounts = table.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let _device = words.next()?;
        let at = words.next()?;
        let fs_type = words.next()?;
        // The path of a mount that is escaped is not used.
        let at = PathBuf::from(at);
        path.starts_with(&at).then(|| Mount { path: at, fs_type: fs_type.to_owned(), line: line.to_owned() })
    });
    mounts.max_by_key(|mount| mount.path.components().count())
}
