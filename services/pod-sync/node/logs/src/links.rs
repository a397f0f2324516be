//! Links to container logs in `/var/log/containers`. Log collectors read the pod, namespace and container
//! from their names.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A link to a container log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) name: String,
    pub(crate) target: PathBuf,
}

/// Removes broken links into `pod_logs_dir`, except those with these names. Other links are not ours.
/// `exists` returns whether a log exists, or `None` if that is not known.
pub(crate) fn remove_broken(
    dir: &Path,
    pod_logs_dir: &Path,
    names: &HashSet<&str>,
    exists: impl Fn(&Path) -> Option<bool>,
) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let wanted = entry.file_name().to_str().is_some_and(|name| names.contains(name));
        if target.starts_with(pod_logs_dir) && !wanted && exists(&target) == Some(false) {
            remove(&entry.path());
        }
    }
    Ok(())
}

/// Creates missing links. `exists`: as in [`remove_broken`].
pub(crate) fn make(dir: &Path, links: &[Link], exists: impl Fn(&Path) -> Option<bool>) {
    for link in links {
        let path = dir.join(&link.name);
        match fs::read_link(&path) {
            Ok(target) if target == link.target => continue,
            // A link with another target is from an earlier container or layout.
            Ok(_) => remove(&path),
            Err(_) => {}
        }
        if exists(&link.target) == Some(true)
            && let Err(error) = symlink(&link.target, &path)
        {
            tracing::debug!(link = %path.display(), %error, "failed to link log");
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(link = %path.display(), %error, "failed to remove link");
    }
}
