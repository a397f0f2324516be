//! How a process of this node ended, as its supervisor noted it.
//!
//! `quintctl up` and systemd (`ExecStopPost=`) write a line `RESULT STATUS` to a file per service, with systemd's words: see
//! systemd.exec(5), `$SERVICE_RESULT` and `$EXIT_STATUS`. Where no supervisor writes the file, nobody knows.

use std::path::Path;

use pod_sync_decisions::containment::ProcessExit;

/// Signals by which a process ends itself.
const OWN: [&str; 7] = ["ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP"];

/// Reads the note of a supervisor; `oom_killed`: the kernel's OOM killer was at work in the cgroup of the process.
#[must_use]
pub fn cause(note: &str, oom_killed: bool) -> ProcessExit {
    let mut words = note.split_whitespace();
    match (words.next().unwrap_or_default(), words.next().unwrap_or_default()) {
        ("oom-kill", _) => ProcessExit::OutOfMemory,
        ("signal", "KILL") if oom_killed => ProcessExit::OutOfMemory,
        ("signal" | "core-dump", signal) if OWN.contains(&signal) => {
            ProcessExit::Crash(format!("SIG{signal}"))
        }
        // A panic outside of the work of pods, too: no pod is to blame.
        (_, _) => ProcessExit::External,
    }
}

/// Takes the note at `path` away and reads it. Without one nobody knows how the process ended.
#[must_use]
pub fn take(path: &Path) -> String {
    let note = std::fs::read_to_string(path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    note
}

/// How many processes of this process' own cgroup the OOM killer has ended; none where the cgroup does not tell, as the root.
#[must_use]
pub fn oom_kills() -> Option<u64> {
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
    fn only_what_a_process_does_to_itself_and_the_oom_killer_are_deaths() {
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
    fn both_kinds_of_cgroups_count_kills() {
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
