//! Ends what is in a group, then the group.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::CgroupError;

// Upstream's number; a process that forks faster than this is killed on the next pass.
const KILL_ROUNDS: u32 = 5;
const KILL_PAUSE: Duration = Duration::from_millis(20);
// A group is busy for a moment after its last process was reaped: 10 ms doubling, about 600 ms in all.
const REMOVE_ATTEMPTS: u32 = 6;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

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

pub(super) fn kill_all(group: &str, dirs: &[PathBuf]) -> Result<(), CgroupError> {
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

pub(super) fn remove_dirs(dir: &Path) -> io::Result<()> {
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
