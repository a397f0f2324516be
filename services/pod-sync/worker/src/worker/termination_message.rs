//! The termination message of a container: its file, or the end of its log
//! (`pkg/kubelet/kuberuntime: getTerminationMessage`).

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use pod_sync_cri_config::mounts::make_absolute;
use quintlet_model::labels;
use quintlet_model::runtime::{Container, ContainerState};

use super::runtime_files;

/// Bytes read from the end of the file (pkg/kubelet/container/runtime.go).
const FROM_FILE: u64 = 4096;
/// Bytes read from the end of the log.
const FROM_LOG: usize = 2048;
/// Lines read from the end of the log.
const LINES: usize = 80;
/// Bytes at the end of the log that are searched for those lines.
const LOG_WINDOW: u64 = 256 << 10;

/// The directories of a pod that may have files at paths that the runtime reports.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places<'a> {
    /// The pod's directory.
    pub pod: &'a Path,
    /// The pod's log directory.
    pub logs: &'a Path,
}

/// Returns the termination message of an exited container, empty if it has none. Blocks on disk access only.
/// The pod may replace the files by anything, and the runtime may report any path: nothing outside of the
/// directories of the pod is read.
#[must_use]
pub(super) fn of(container: &Container, places: Places<'_>) -> String {
    if container.state != ContainerState::Exited {
        return String::new();
    }
    let annotation = |key: &str| container.annotations.get(key).map(String::as_str).unwrap_or_default();
    let fallback = annotation(labels::TERMINATION_MESSAGE_POLICY) == "FallbackToLogsOnError"
        && container.exit_code != 0
        && container.reason != "ContainerCannotRun";
    let from_log = || if fallback { log(places.logs, Path::new(&container.log_path)) } else { String::new() };
    let path = annotation(labels::TERMINATION_MESSAGE_PATH);
    if path.is_empty() {
        return from_log();
    }
    // The mount that pod-sync adds follows those of the spec, one of which may have the same path.
    let path = make_absolute(path);
    let mount = container.mounts.iter().rfind(|m| m.container_path == path);
    let Some(mount) = mount else { return from_log() };
    match tail(places.pod, Path::new(&mount.host_path), FROM_FILE) {
        Ok(bytes) if bytes.is_empty() => from_log(),
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => from_log(),
        Err(e) => format!("Error on reading termination log {}: {e}", mount.host_path),
    }
}

fn tail(dir: &Path, path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let (dir, path) = runtime_files::beneath(dir, path)?;
    let mut file = dir.read(&path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Lines of CRI logs are `<time> <stream> <P|F> <text>`.
fn log(dir: &Path, path: &Path) -> String {
    let bytes = match tail(dir, path, LOG_WINDOW) {
        Ok(bytes) => bytes,
        Err(e) => return format!("Error on reading termination message from logs: {e}"),
    };
    let text = String::from_utf8_lossy(&bytes);
    let mut out = String::new();
    let lines: Vec<&str> = text.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(LINES)) {
        let mut parts = line.splitn(4, ' ');
        let (Some(_), Some(_), Some(tag), Some(content)) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        out.push_str(content);
        if tag == "F" {
            out.push('\n');
        }
    }
    let mut start = out.len().saturating_sub(FROM_LOG);
    while !out.is_char_boundary(start) {
        start = start.saturating_add(1);
    }
    out.split_off(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::{ContainerId, SandboxId};
    use quintlet_model::runtime::Mount;
    use std::collections::BTreeMap;

    fn read(dir: &Path, container: &Container) -> String {
        of(container, Places { pod: dir, logs: dir })
    }

    fn exited(dir: &Path, policy: &str, exit_code: i32) -> Container {
        let annotations = [
            (labels::TERMINATION_MESSAGE_PATH, "/dev/termination-log"),
            (labels::TERMINATION_MESSAGE_POLICY, policy),
        ];
        Container {
            id: ContainerId::parse("c").unwrap(),
            sandbox_id: SandboxId::parse("s").unwrap(),
            name: "a".into(),
            attempt: 0,
            state: ContainerState::Exited,
            created_unix_ns: 1,
            started_unix_ns: 1,
            finished_unix_ns: 1,
            exit_code,
            reason: "Error".into(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            image_id: String::new(),
            log_path: dir.join("0.log").display().to_string(),
            labels: BTreeMap::new(),
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            mounts: vec![Mount {
                container_path: "/dev/termination-log".into(),
                host_path: dir.join("term").display().to_string(),
                readonly: false,
            }],
            resources: None,
            user: None,
            stop_signal: String::new(),
        }
    }

    #[test]
    fn the_file_wins_and_the_log_speaks_only_for_a_failure_with_that_policy() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("0.log"), "2026-01-01T00:00:00Z stdout F last words\n").unwrap();
        for (file, policy, code, want) in [
            (Some("bye"), "File", 1, "bye"),
            (Some("bye"), "FallbackToLogsOnError", 1, "bye"),
            (Some(""), "FallbackToLogsOnError", 1, "last words\n"),
            (None, "FallbackToLogsOnError", 1, "last words\n"),
            (Some(""), "FallbackToLogsOnError", 0, ""),
            (Some(""), "File", 1, ""),
            (None, "File", 1, ""),
        ] {
            let path = dir.path().join("term");
            let _ = std::fs::remove_file(&path);
            if let Some(text) = file {
                std::fs::write(&path, text).unwrap();
            }
            assert_eq!(read(dir.path(), &exited(dir.path(), policy, code)), want, "{file:?} {policy} {code}");
        }
    }

    #[test]
    fn a_path_that_is_no_file_gets_an_error_and_the_added_mount_is_the_last_of_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(at("secret"), "of the node").unwrap();
        std::os::unix::fs::symlink(at("secret"), at("link")).unwrap();
        std::fs::write(at("ours"), "bye").unwrap();
        let mount = |inside: &str, name: &str| Mount {
            container_path: inside.to_owned(),
            host_path: at(name).display().to_string(),
            readonly: false,
        };
        let log = "/dev/termination-log";
        let cases: [(&str, Vec<Mount>, &str); 5] = [
            (log, vec![mount(log, "pipe")], "Error on reading termination log"),
            (log, vec![mount(log, "link")], "Error on reading termination log"),
            (log, vec![mount(log, "pipe"), mount(log, "ours")], "bye"),
            ("dev/termination-log", vec![mount(log, "ours")], "bye"),
            ("/elsewhere", vec![mount(log, "ours")], ""),
        ];
        for (path, mounts, want) in cases {
            let mut container = exited(dir.path(), "File", 1);
            container.annotations.insert(labels::TERMINATION_MESSAGE_PATH.to_owned(), path.to_owned());
            container.mounts = mounts;
            let got = read(dir.path(), &container);
            assert!(got.starts_with(want) && got.is_empty() == want.is_empty(), "{path}: {got}");
        }
    }

    #[test]
    fn a_path_outside_of_the_pods_directories_is_not_read_whatever_the_runtime_reports() {
        let temp = tempfile::tempdir().unwrap();
        let [pod, logs, other] = ["pod", "logs", "other"].map(|name| temp.path().join(name));
        for dir in [&pod, &logs, &other] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join("term"), "reason").unwrap();
            std::fs::write(dir.join("0.log"), "2026-01-01T00:00:00Z stdout F reason\n").unwrap();
        }
        std::os::unix::fs::symlink(&other, pod.join("linked")).unwrap();
        std::os::unix::fs::symlink(&other, logs.join("linked")).unwrap();
        let places = Places { pod: &pod, logs: &logs };
        for (path, is_read) in [
            (pod.join("term"), true),
            (other.join("term"), false),
            (pod.join("linked/term"), false),
            (pod.join("../other/term"), false),
            (logs.join("term"), false),
        ] {
            let mut container = exited(&pod, "File", 1);
            container.mounts[0].host_path = path.display().to_string();
            let got = of(&container, places);
            assert_eq!(got == "reason", is_read, "{got}");
            assert!(is_read || got.starts_with("Error on reading termination log"), "{got}");
        }
        for (path, is_read) in [
            (logs.join("0.log"), true),
            (other.join("0.log"), false),
            (logs.join("linked/0.log"), false),
            (logs.join("../other/0.log"), false),
        ] {
            let mut container = exited(&pod, "FallbackToLogsOnError", 1);
            container.mounts.clear();
            container.log_path = path.display().to_string();
            let got = of(&container, places);
            assert_eq!(got == "reason\n", is_read, "{got}");
            assert!(is_read || got.starts_with("Error on reading termination message from logs"), "{got}");
        }
        let link = temp.path().join("link-to-pod");
        std::os::unix::fs::symlink(&pod, &link).unwrap();
        let through_a_link = Places { pod: &link, logs: &logs };
        let mut container = exited(&pod, "File", 1);
        for reported in [pod.join("term"), link.join("term")] {
            container.mounts[0].host_path = reported.display().to_string();
            assert_eq!(of(&container, through_a_link), "reason", "the root directory itself may be a link");
        }
    }

    #[test]
    fn only_the_last_bytes_of_the_file_count() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("term"), format!("{}end", "x".repeat(5000))).unwrap();
        let got = read(dir.path(), &exited(dir.path(), "File", 0));
        assert_eq!((got.len(), got.ends_with("end")), (4096, true));
    }
}
