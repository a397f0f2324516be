//! Removes what killed processes of this crate left on the machine.

use std::path::{Path, PathBuf};
use std::sync::Once;

use nix::mount::MntFlags;

static ONCE: Once = Once::new();

/// Prefix of the names of directories and cgroups, before the process ID.
const PREFIX: &str = "qsim-";

pub(crate) fn prefix() -> String {
    format!("{PREFIX}{}-", std::process::id())
}

/// Removes the files and cgroups of processes that no longer exist. Runs once per process.
pub(crate) fn clear() {
    ONCE.call_once(|| {
        for dir in entries(&std::env::temp_dir()).into_iter().filter(|d| is_left(d)) {
            unmount(&dir);
            let _somebody_else_does = std::fs::remove_dir_all(dir);
        }
        for root in cgroup_roots() {
            entries(&root).into_iter().filter(|d| is_left(d)).for_each(|group| remove_group(&group));
        }
    });
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

fn is_left(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).map(|(pid, _)| pid);
    pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists())
}

/// Unmounts everything below a directory.
pub(crate) fn unmount(dir: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let below =
        mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|at| Path::new(at).starts_with(dir));
    for at in below {
        let _already_gone = nix::mount::umount2(at, MntFlags::MNT_DETACH);
    }
}

/// Returns the mount points of all cgroup hierarchies.
pub(crate) fn cgroup_roots() -> Vec<PathBuf> {
    let all = PathBuf::from("/sys/fs/cgroup");
    [entries(&all), vec![all]].concat()
}

/// Removes a cgroup and its descendants. Only directories can be removed there.
pub(crate) fn remove_group(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let _not_there = std::fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_a_dead_process_are_removed_with_its_mounts_and_cgroups() {
        assert!(nix::unistd::geteuid().is_root(), "mounts and cgroups are made: run this test as root");
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let tmpfs = Some("tmpfs");
        let made: Vec<(PathBuf, PathBuf)> = [dead.id(), std::process::id()]
            .map(|pid| {
                let dir = std::env::temp_dir().join(format!("{PREFIX}{pid}-left"));
                std::fs::create_dir_all(dir.join("root")).unwrap();
                let flags = nix::mount::MsFlags::empty();
                nix::mount::mount(tmpfs, &dir.join("root"), tmpfs, flags, None::<&str>).unwrap();
                let hierarchies = cgroup_roots();
                let root = hierarchies.iter().find(|r| r.join("cgroup.procs").exists()).unwrap();
                let group = root.join(format!("{PREFIX}{pid}-left"));
                std::fs::create_dir_all(group.join("kubepods")).unwrap();
                (dir, group)
            })
            .into();
        clear();
        let there = |(dir, group): &(PathBuf, PathBuf)| (dir.exists(), group.exists());
        let left: Vec<_> = made.iter().map(there).collect();
        let (dir, group) = &made[1];
        unmount(dir);
        std::fs::remove_dir_all(dir).unwrap();
        remove_group(group);
        assert_eq!(left, [(false, false), (true, true)]);
    }
}
