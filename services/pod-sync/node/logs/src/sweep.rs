//! Finds log directories of pods that are gone, and links to logs that are gone
//! (`pkg/kubelet/kuberuntime: evictPodLogsDirectories`).
//!
//! Each function lists first and asks about each entry afterwards. A pod that is admitted during the list is
//! known by then, so that its logs stay.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pod_sync_node_decisions::gc;
use quintlet_model::ids::PodUid;

/// Calls `remove` with the log directories in `dir` of pods that are unknown when it is their turn. Blocks.
pub fn dead_directories(
    dir: &Path,
    is_known: impl Fn(&PodUid) -> bool,
    mut remove: impl FnMut(&PodUid, &Path),
) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let listed: Vec<(PodUid, PathBuf)> = entries
        .filter_map(|e| {
            let name = e.file_name();
            let uid = name.to_str().and_then(gc::log_dir_uid).and_then(|u| PodUid::parse(u).ok())?;
            e.file_type().is_ok_and(|t| t.is_dir()).then(|| (uid, e.path()))
        })
        .collect();
    for (uid, path) in listed {
        if !is_known(&uid) {
            remove(&uid, &path);
        }
    }
}

/// Returns the links in `dir` to logs that are gone, except those of containers that run. A log is absent for
/// a moment while it is rotated. Blocks.
#[must_use]
pub fn dangling_links(dir: &Path, is_running: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let links = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_symlink())).map(|e| e.path());
    let dangling =
        links.filter(|path| fs::metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound));
    let dangling: Vec<PathBuf> = dangling.collect();
    dangling
        .into_iter()
        .filter(|path| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let Some(stem) = name.strip_suffix(".log") else { return false };
            !stem.rsplit_once('-').is_some_and(|(_, id)| is_running(id))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    #[test]
    fn log_directories_of_unknown_pods_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["default_web_u1", "default_web_u2", "odd", "x_u3"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("default_file_u4"), "").unwrap();
        let removed = |dir: &Path| {
            let mut removed = Vec::new();
            let is_known = |pod: &PodUid| *pod == uid("u1");
            dead_directories(dir, is_known, |pod, path| removed.push((pod.clone(), path.to_owned())));
            removed
        };
        assert_eq!(removed(dir.path()), [(uid("u2"), dir.path().join("default_web_u2"))]);
        assert!(removed(&dir.path().join("nowhere")).is_empty());
    }

    #[test]
    fn a_pod_that_is_admitted_during_the_sweep_keeps_its_logs() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..4 {
            fs::create_dir(dir.path().join(format!("default_web_u{n}"))).unwrap();
        }
        // The removal of the first directory takes long. Meanwhile all other pods are admitted.
        let known = RefCell::new(BTreeSet::new());
        let mut removed = 0;
        dead_directories(
            dir.path(),
            |pod| known.borrow().contains(pod),
            |_, path| {
                removed += 1;
                fs::remove_dir(path).unwrap();
                known.borrow_mut().extend((0..4).map(|n| uid(&format!("u{n}"))));
            },
        );
        assert_eq!((removed, fs::read_dir(dir.path()).unwrap().count()), (1, 3));
    }

    #[test]
    fn a_link_is_removed_when_its_log_is_gone_and_its_container_does_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("there"), "").unwrap();
        for (link, target) in [
            ("web_default_c-aaa.log", "there"),
            ("web_default_c-bbb.log", "gone"),
            ("web_default_c-ccc.log", "gone"),
            ("other.txt", "gone"),
        ] {
            std::os::unix::fs::symlink(at(target), at(link)).unwrap();
        }
        fs::write(at("plain-ddd.log"), "").unwrap();
        assert_eq!(dangling_links(dir.path(), |id| id == "ccc"), [at("web_default_c-bbb.log")]);
    }
}
