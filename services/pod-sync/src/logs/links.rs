//! `/var/log/containers`: a link to the log of each container, by which log collectors find pod, namespace and name.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A link that is to be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its name in the directory.
    pub name: String,
    /// The log.
    pub target: PathBuf,
}

/// Removes broken links that lead into `pod_logs_dir`, but those of these names. Links that lead elsewhere are not ours.
///
/// # Errors
/// The directory cannot be made or read.
pub fn remove_broken(dir: &Path, pod_logs_dir: &Path, names: &HashSet<&str>) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let wanted = entry.file_name().to_str().is_some_and(|name| names.contains(name));
        if target.starts_with(pod_logs_dir) && !target.exists() && !wanted {
            remove(&entry.path());
        }
    }
    Ok(())
}

/// Makes links that are missing.
pub fn make(dir: &Path, links: &[Link]) {
    for link in links {
        let path = dir.join(&link.name);
        match fs::read_link(&path) {
            Ok(target) if target == link.target => continue,
            // A link of that name that leads elsewhere is of an earlier layout.
            Ok(_) => remove(&path),
            Err(_) => {}
        }
        if link.target.exists()
            && let Err(error) = symlink(&link.target, &path)
        {
            tracing::debug!(link = %path.display(), %error, "log not linked");
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(link = %path.display(), %error, "link not removed");
    }
}
