//! Access to files at paths that the runtime reports, only below the directory that pod-sync requested.

use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::{beneath, failpoint, tree};
use rustix::fs::Dir;

/// Opens `dir`, whose own path is trusted, and returns it with `path` relative to it. A runtime may report
/// the path with the symbolic links of `dir` resolved.
///
/// # Errors
/// `dir` cannot be opened, or `path` is not below it.
pub(super) fn beneath(dir: &Path, path: &Path) -> io::Result<(beneath::Dir, PathBuf)> {
    let opened = beneath::Dir::open(dir)?;
    let relative = match path.strip_prefix(dir) {
        Ok(relative) => relative.to_owned(),
        Err(_) => path.strip_prefix(dir.canonicalize()?).map(Path::to_owned).map_err(|_| {
            let text = format!("{} is not beneath {}", path.display(), dir.display());
            io::Error::new(io::ErrorKind::PermissionDenied, text)
        })?,
    };
    Ok((opened, relative))
}

/// Deletes the log of a container and its rotated files, if they are below the log directory of the pod.
/// Blocks.
///
/// # Errors
/// The log is not below that directory, or the directory cannot be read. A file that cannot be deleted stays.
pub(super) fn remove_logs(pod_logs: &Path, log: &Path) -> io::Result<()> {
    let (pod_logs, log) = beneath(pod_logs, log)?;
    let (Some(parent), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(());
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let dir = pod_logs.dir(parent)?;
    let entries = Dir::new(tree::open_within(std::os::fd::AsFd::as_fd(&dir), c".")?)?;
    let rotated = format!("{name}.");
    for entry in entries {
        let entry = entry?;
        let Ok(found) = entry.file_name().to_str() else { continue };
        if found == name || found.starts_with(&rotated) {
            let _ = failpoint::file!("log removed", || dir.remove_file(Path::new(found)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_deleted_with_their_rotations_and_only_beneath_the_pods_directory() {
        let temp = tempfile::tempdir().unwrap();
        let [logs, other] = ["logs", "other"].map(|name| temp.path().join(name));
        for dir in [logs.join("c"), other.clone()] {
            std::fs::create_dir_all(&dir).unwrap();
            for name in ["0.log", "0.log.20260101-000000", "0.log.20260101-000001.gz", "10.log"] {
                std::fs::write(dir.join(name), "").unwrap();
            }
        }
        std::os::unix::fs::symlink(&other, logs.join("linked")).unwrap();
        let names = |dir: &Path| {
            let mut names: Vec<_> = std::fs::read_dir(dir)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        remove_logs(&logs, &logs.join("c/0.log")).unwrap();
        assert_eq!(names(&logs.join("c")), ["10.log"]);
        for path in [other.join("0.log"), logs.join("linked/0.log"), logs.join("../other/0.log"), "".into()] {
            let _ = remove_logs(&logs, &path);
            assert_eq!(names(&other).len(), 4, "{}", path.display());
        }
    }
}
