//! What a container left to say when it ended (kuberuntime_container.go: getTerminationMessage).

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use quintlet_model::labels;
use quintlet_model::runtime::{Container, ContainerState};
use rustix::fs::OFlags;

const MAX_MESSAGE: u64 = 4096;
const MAX_FROM_LOG: usize = 2048;
const LOG_LINES: usize = 80;
// Entries are at most 16 KiB, so the last bytes of the message are within this of the end.
const LOG_TAIL: u64 = 64 << 10;

/// The message of an exited container: the end of its termination log, or of its output where the policy says so.
/// A file that cannot be read is told of in the message. Blocks; `None` for a container that has nothing to say.
#[must_use]
pub fn message(container: &Container) -> Option<String> {
    if container.state != ContainerState::Exited {
        return None;
    }
    let annotation = |key: &str| container.annotations.get(key).map(String::as_str).filter(|v| !v.is_empty());
    let host = annotation(labels::TERMINATION_MESSAGE_PATH)
        .and_then(|inside| container.mounts.iter().find(|m| m.container_path == inside));
    if let Some(mount) = host {
        match tail(Path::new(&mount.host_path), MAX_MESSAGE) {
            Ok(bytes) if !bytes.is_empty() => return Some(String::from_utf8_lossy(&bytes).into_owned()),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Some(format!("Error on reading termination log {}: {e}", mount.host_path)),
        }
    }
    let falls_back = annotation(labels::TERMINATION_MESSAGE_POLICY) == Some("FallbackToLogsOnError")
        && container.exit_code != 0
        && container.reason != "ContainerCannotRun";
    if !falls_back || container.log_path.is_empty() {
        return None;
    }
    match tail(Path::new(&container.log_path), LOG_TAIL) {
        Ok(bytes) => Some(from_log(&String::from_utf8_lossy(&bytes))).filter(|m| !m.is_empty()),
        Err(e) => Some(format!("Error on reading termination message from logs: {e}")),
    }
}

fn tail(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // A container has written to it: it must not be a link, and opening it must not wait.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let mut file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The output in the last 80 entries of a log in the CRI's format (`<time> <stream> <F|P> <text>`), at most its last
/// 2048 bytes.
fn from_log(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let mut out = String::new();
    for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
        let mut fields = line.splitn(4, ' ');
        // The first line may be cut in the middle; it is then no entry.
        let (Some(_), Some("stdout" | "stderr"), Some(tags), text) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        out.push_str(text.unwrap_or_default());
        if !tags.split(':').any(|t| t == "P") {
            out.push('\n');
        }
    }
    let mut start = out.len().saturating_sub(MAX_FROM_LOG);
    while !out.is_char_boundary(start) {
        start += 1;
    }
    out.split_off(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::{ContainerId, SandboxId};
    use quintlet_model::runtime::Mount;

    fn exited(dir: &Path, policy: &str, exit_code: i32) -> Container {
        Container {
            id: ContainerId::parse("c1").unwrap(),
            sandbox_id: SandboxId::parse("s1").unwrap(),
            name: "c".into(),
            attempt: 0,
            state: ContainerState::Exited,
            created_unix_ns: 0,
            started_unix_ns: 0,
            finished_unix_ns: 0,
            exit_code,
            reason: "Error".into(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            image_id: String::new(),
            log_path: dir.join("0.log").display().to_string(),
            labels: Default::default(),
            annotations: [
                (labels::TERMINATION_MESSAGE_PATH.to_owned(), "/dev/termination-log".to_owned()),
                (labels::TERMINATION_MESSAGE_POLICY.to_owned(), policy.to_owned()),
            ]
            .into(),
            mounts: vec![Mount {
                container_path: "/dev/termination-log".into(),
                host_path: dir.join("log").display().to_string(),
                readonly: false,
            }],
            resources: None,
            user: None,
        }
    }

    #[test]
    fn the_end_of_the_file_is_the_message() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("log");
        let c = exited(tmp.path(), "File", 1);
        assert_eq!(message(&c), None);
        fs::write(&file, "why").unwrap();
        assert_eq!(message(&c).unwrap(), "why");
        fs::write(&file, "x".repeat(5000) + "end").unwrap();
        let long = message(&c).unwrap();
        assert_eq!((long.len(), long.ends_with("xend")), (4096, true));
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert!(message(&c).unwrap().starts_with("Error on reading termination log "));
        let running = Container { state: ContainerState::Running, ..c };
        assert_eq!(message(&running), None);
    }

    #[test]
    fn output_stands_in_only_after_a_failure_and_an_empty_file() {
        let tmp = tempfile::tempdir().unwrap();
        let entry = |i: usize| format!("2026-01-01T00:00:00Z stdout F line {i}\n");
        fs::write(tmp.path().join("0.log"), (0..200).map(entry).collect::<String>()).unwrap();
        fs::write(tmp.path().join("log"), "").unwrap();
        let policy = "FallbackToLogsOnError";
        let got = message(&exited(tmp.path(), policy, 1)).unwrap();
        assert!(got.starts_with("line 120\n") && got.ends_with("line 199\n"), "{got}");
        assert_eq!(message(&exited(tmp.path(), policy, 0)), None);
        assert_eq!(message(&exited(tmp.path(), "File", 1)), None);
        let cannot = Container { reason: "ContainerCannotRun".into(), ..exited(tmp.path(), policy, 1) };
        assert_eq!(message(&cannot), None);
        fs::write(tmp.path().join("log"), "said").unwrap();
        assert_eq!(message(&exited(tmp.path(), policy, 1)).unwrap(), "said");
        assert_eq!(from_log("cut stdou\nt stderr P a\nt stderr F b\n"), "ab\n");
        assert_eq!(from_log(&format!("t stdout F {}\n", "é".repeat(2000))).len(), 2047);
    }
}
