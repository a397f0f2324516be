//! Exit notes: how a service of this node ended, as its supervisor recorded it.
//!
//! `quintctl up` and systemd (`ExecStopPost=`) write a line `RESULT STATUS` to a file per service, with the
//! values of `$SERVICE_RESULT` and `$EXIT_STATUS` in systemd.exec(5). Without a supervisor there is no note,
//! and the cause is unknown.

use std::path::Path;

use pod_sync_decisions::containment::ProcessExit;

/// Signals of a crash.
const CRASH_SIGNALS: [&str; 7] = ["ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP"];

/// Returns the cause of an exit. `oom_killed`: the kernel's OOM killer has killed a process in the cgroup of
/// the service.
#[must_use]
pub(crate) fn cause(note: &str, oom_killed: bool) -> ProcessExit {
    let mut words = note.split_whitespace();
    match (words.next().unwrap_or_default(), words.next().unwrap_or_default()) {
        ("oom-kill", _) => ProcessExit::OutOfMemory,
        ("signal", "KILL") if oom_killed => ProcessExit::OutOfMemory,
        ("signal" | "core-dump", signal) if CRASH_SIGNALS.contains(&signal) => {
            ProcessExit::Crash(format!("SIG{signal}"))
        }
        // This includes a panic outside of the work of pods, which no pod has caused.
        (_, _) => ProcessExit::External,
    }
}

/// Reads and removes the note at `path`. Returns an empty text if there is none.
#[must_use]
pub(crate) fn take(path: &Path) -> String {
    let note = std::fs::read_to_string(path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    note
}

/// Returns the number of OOM kills in the cgroup of this process, or `None` if the cgroup has no such
/// counter, like the root cgroup.
#[must_use]
pub(crate) fn oom_kills() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = |line: &str| -> Option<String> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        if controllers.is_empty() {
            return Some(format!("/sys/fs/cgroup{path}/memory.events"));
        }
        let is_memory = controllers.split(',').any(|c| c == "memory");
        is_memory.then(|| format!("/sys/fs/cgroup/memory{path}/memory.oom_control"))
    };
    own.lines().filter_map(path).find_map(|path| count(&std::fs::read_to_string(path).ok()?))
}

fn count(file: &str) -> Option<u64> {
    file.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_crash_signals_and_oom_kills_are_held_against_pods() {
        let crash = |signal: &str| ProcessExit::Crash(signal.to_owned());
        for (note, oom_killed, want) in [
            ("signal ABRT", false, crash("SIGABRT")),
            ("core-dump SEGV\n", false, crash("SIGSEGV")),
            ("signal KILL", false, ProcessExit::External),
            ("signal KILL", true, ProcessExit::OutOfMemory),
            ("oom-kill KILL", false, ProcessExit::OutOfMemory),
            ("signal TERM", true, ProcessExit::External),
            ("watchdog ABRT", false, ProcessExit::External),
            ("exit-code 70", true, ProcessExit::External),
            ("success 0", false, ProcessExit::External),
            ("", true, ProcessExit::External),
        ] {
            assert_eq!(cause(note, oom_killed), want, "{note:?} {oom_killed}");
        }
    }

    #[test]
    fn oom_kills_are_read_from_both_cgroup_versions() {
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(count("low 0\noom 5\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(count("low 0\n"), None);
    }

    #[test]
    fn a_note_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pod-sync");
        std::fs::write(&path, "signal ABRT\n").unwrap();
        assert_eq!((take(&path).as_str(), take(&path).as_str()), ("signal ABRT\n", ""));
    }
}
