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

/// Makes links that are missing and removes broken ones that lead into `pod_logs_dir`; others are not ours.
///
/// # Errors
/// The directory cannot be read.
pub fn keep(dir: &Path, pod_logs_dir: &Path, wanted: &[Link]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let names: HashSet<&str> = wanted.iter().map(|l| l.name.as_str()).collect();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let wanted = entry.file_name().to_str().is_some_and(|name| names.contains(name));
        if target.starts_with(pod_logs_dir) && !target.exists() && !wanted {
            remove(&entry.path());
        }
    }
    for link in wanted {
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
    Ok(())
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(link = %path.display(), %error, "link not removed");
    }
}
