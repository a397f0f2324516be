//! The process of pod-sync.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test waits for processes, in real time"
)]

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Runs pod-sync on a root directory until it exits by itself, and returns its exit code and its last line.
fn refused(root_dir: &Path) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_pod-sync"))
        .args(["--root-dir".as_ref(), root_dir, "--run-dir".as_ref(), &root_dir.join("run")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text.lines().next_back().unwrap_or_default().to_owned())
}

/// Starts a process named `kubelet` with this root directory, in a process group of its own.
fn kubelet(root_dir: &Path) -> Child {
    let argument = format!("--root-dir={}", root_dir.display());
    let mut command = Command::new("sh");
    command.arg0("kubelet").args(["-c", "sleep 60; :", &argument]);
    let child = command.stdin(Stdio::null()).process_group(0).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !std::fs::read_to_string(format!("/proc/{}/cmdline", child.id())).unwrap().starts_with("kubelet\0")
    {
        assert!(Instant::now() < deadline, "the shell is not executed");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

#[test]
fn a_root_directory_of_another_agent_is_refused_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = kubelet(dir.path());
    let (code, line) = refused(dir.path());
    kill(Pid::from_raw(-first.id().cast_signed()), Signal::SIGKILL).unwrap();
    first.wait().unwrap();
    assert_eq!(code, Some(69), "{line}");
    let named = format!(
        "pod-sync: {} is the root directory of a kubelet that runs, pid {} (kubelet -c sleep 60; : --root-dir=",
        dir.path().display(),
        first.id()
    );
    assert!(line.starts_with(&named), "{line}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is created");

    let file = std::fs::File::create(dir.path().join("quintlet-owner")).unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
    let (code, line) = refused(dir.path());
    drop(lock);
    assert_eq!(code, Some(69), "{line}");
    let named = format!(
        "pod-sync: {} is the root directory of another Quintlet that runs, pid {} (",
        dir.path().display(),
        std::process::id()
    );
    assert!(line.starts_with(&named), "{line}");
}
