//! The supervisor, with scripts in place of the services.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SERVICES: [&str; 5] = ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// Appends its starts and signals to a common file.
const SERVICE: &str = r#"#!/bin/sh
name=$(basename "$0")
trap 'echo "$name term" >> NOTES; exit 0' TERM
trap 'echo "$name drain" >> NOTES; exit 0' USR1
echo "$name start $$" >> NOTES
while :; do sleep 0.05; done
"#;

/// Ignores SIGTERM.
const DEAF: &str =
    "#!/bin/sh\ntrap '' TERM\necho \"$(basename \"$0\") start $$\" >> NOTES\nwhile :; do sleep 0.05; done\n";

struct Node {
    dir: tempfile::TempDir,
    up: Child,
}

impl Node {
    fn start(flags: &[&str], deaf: &str) -> Self {
        Self::start_processes(SERVICES.len(), flags, deaf)
    }

    fn start_processes(count: usize, flags: &[&str], deaf: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The services run as separate users, which need access.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        for name in SERVICES {
            let script = if name == deaf { DEAF } else { SERVICE };
            let notes = dir.path().join("notes");
            let script = script.replace("NOTES", &notes.display().to_string());
            std::fs::File::options().create(true).append(true).open(&notes).unwrap();
            std::fs::set_permissions(&notes, std::fs::Permissions::from_mode(0o666)).unwrap();
            std::fs::write(bin.join(name), script).unwrap();
            std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let up = Self::up(dir.path(), flags);
        let node = Self { dir, up };
        node.wait_for("start of each process", |notes| {
            notes.iter().filter(|n| n.contains(" start ")).count() == count
        });
        node
    }

    fn up(dir: &Path, flags: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_quintctl"))
            .args(["up", "--runtime-endpoint", "unix:///nowhere.sock", "--base"])
            .arg(dir)
            .arg("--bin-dir")
            .arg(dir.join("bin"))
            .args(flags)
            .stdout(std::fs::File::options().create(true).append(true).open(dir.join("out")).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn notes(&self) -> Vec<String> {
        std::fs::read_to_string(self.path("notes")).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    fn wait_for(&self, what: &str, there: impl Fn(&[String]) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !there(&self.notes()) {
            assert!(Instant::now() < deadline, "no {what} in time: {:#?}", self.notes());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn pids(&self, name: &str) -> Vec<i32> {
        let prefix = format!("{name} start ");
        self.notes().iter().filter_map(|n| n.strip_prefix(&prefix)?.parse().ok()).collect()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.up.id().cast_signed()), signal).unwrap();
    }

    fn end(&mut self) -> (Option<i32>, String) {
        let status = self.up.wait().unwrap();
        (status.code(), std::fs::read_to_string(self.path("out")).unwrap())
    }

    /// Returns the signals in the order in which the services received them.
    fn ends(&self) -> Vec<String> {
        self.notes().into_iter().filter(|n| !n.contains(" start ")).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.up.kill();
        for name in SERVICES {
            for pid in self.pids(name) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

#[test]
fn a_killed_service_is_restarted_and_the_others_keep_running() {
    let mut node = Node::start(&[], "");
    kill(Pid::from_raw(node.pids("pleg-service")[0]), Signal::SIGKILL).unwrap();
    node.wait_for("second start", |notes| {
        notes.iter().filter(|n| n.starts_with("pleg-service start")).count() == 2
    });
    for name in ["cri-proxy", "probe-service", "status-reporter", "pod-sync"] {
        assert_eq!(node.pids(name).len(), 1, "{name} was started again");
    }
    node.signal(Signal::SIGTERM);
    let (code, out) = node.end();
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("pleg-service exited (SIGKILL), restarting in 200 ms"), "{out}");
}

#[test]
fn each_instance_of_probe_service_is_restarted_and_stopped_on_its_own() {
    let mut node = Node::start_processes(6, &["--probe-instances", "2"], "");
    let recorded = std::fs::read_to_string(node.path("up.json")).unwrap();
    let recorded: serde_json::Value = serde_json::from_str(&recorded).unwrap();
    let pid = i32::try_from(recorded["probe-service-1"]["pid"].as_i64().unwrap()).unwrap();
    assert!(node.pids("probe-service").contains(&pid), "{pid}: {:?}", node.notes());
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    node.wait_for("third start", |notes| {
        notes.iter().filter(|n| n.starts_with("probe-service start")).count() == 3
    });
    node.signal(Signal::SIGTERM);
    let (code, out) = node.end();
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("probe-service-1 exited (SIGKILL), restarting in 200 ms"), "{out}");
    assert!(!out.contains("probe-service exited"), "{out}");
    let ends = node.ends();
    assert_eq!(ends.iter().filter(|end| *end == "probe-service term").count(), 2, "{ends:?}");
    assert_eq!(ends.last().map(String::as_str), Some("cri-proxy term"), "{ends:?}");
}

#[test]
fn services_stop_before_the_services_that_they_call() {
    let mut node = Node::start(&[], "");
    node.signal(Signal::SIGINT);
    let (code, out) = node.end();
    assert_eq!(code, Some(0), "{out}");
    let ends = node.ends();
    assert_eq!(ends.len(), 5, "{ends:?}");
    assert_eq!((ends[0].as_str(), ends[4].as_str()), ("pod-sync term", "cri-proxy term"));
    assert!(out.contains("0 pods keep running … done in"), "{out}");
}

#[test]
fn with_down_pod_sync_drains_before_any_service_stops() {
    let mut node = Node::start(&["--down"], "");
    node.signal(Signal::SIGINT);
    let (code, out) = node.end();
    assert_eq!(code, Some(0), "{out}");
    assert_eq!(node.ends()[0], "pod-sync drain");
    assert!(out.contains("press again to force) … done in"), "{out}");
}

#[test]
fn a_second_signal_kills_a_service_that_ignores_the_first() {
    let mut node = Node::start(&[], "pod-sync");
    let began = Instant::now();
    node.signal(Signal::SIGINT);
    let out = node.path("out");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !std::fs::read_to_string(&out).unwrap().contains("stopping") {
        assert!(Instant::now() < deadline, "not stopping");
        std::thread::sleep(Duration::from_millis(10));
    }
    node.signal(Signal::SIGINT);
    assert_eq!(node.end().0, Some(0));
    assert!(began.elapsed() < Duration::from_secs(4), "took {:?}", began.elapsed());
}

#[test]
fn processes_of_a_killed_supervisor_are_terminated_by_the_next_one() {
    let mut node = Node::start(&[], "");
    node.signal(Signal::SIGKILL);
    node.up.wait().unwrap();
    node.up = Node::up(node.dir.path(), &[]);
    node.wait_for("ten starts", |notes| notes.iter().filter(|n| n.contains(" start ")).count() == 10);
    assert_eq!(node.ends().len(), 5, "{:?}", node.ends());
    node.signal(Signal::SIGTERM);
    assert_eq!(node.end().0, Some(0));
}

#[test]
fn logs_continue_across_starts_and_a_large_one_is_rotated_while_its_service_writes() {
    let mut node = Node::start(&[], "");
    node.signal(Signal::SIGTERM);
    assert_eq!(node.end().0, Some(0));
    let logs = node.path("logs");
    let log = |name: &str| std::fs::read_to_string(logs.join(name)).unwrap_or_default();
    let begins = |text: &str| text.lines().filter(|l| l.contains("quintctl up started")).count();
    let first = log("pod-sync.log");
    assert_eq!(begins(&first), 1, "{first}");
    assert!(!logs.join("containerd.log").exists(), "nobody writes it");

    // Writes until its log has been rotated, and continues.
    let script = "#!/bin/sh\ntrap 'exit 0' TERM\nwhile [ ! -e LOG.1 ]; do seq -f 'line %.0f' 20000 >&2; sleep 0.02; done\n\
        echo 'after the cut' >&2\necho \"pod-sync is cut $$\" >> NOTES\nwhile :; do sleep 0.05; done\n"
        .replace("NOTES", &node.path("notes").display().to_string())
        .replace("LOG", &logs.join("pod-sync.log").display().to_string());
    std::fs::write(node.path("bin/pod-sync"), script).unwrap();
    node.up = Node::up(node.dir.path(), &["--log-max-size", "1", "--log-max-files", "2"]);
    node.wait_for("line after the cut", |notes| notes.iter().any(|n| n.starts_with("pod-sync is cut")));
    node.signal(Signal::SIGTERM);
    assert_eq!(node.end().0, Some(0));
    let now = log("pod-sync.log");
    assert!(now.len() < 1 << 20 && now.ends_with("after the cut\n"), "{} bytes", now.len());
    let old = log("pod-sync.log.1");
    assert!(old.starts_with(&first) && old.len() >= 1 << 20, "earlier lines come first");
    assert!(!logs.join("pod-sync.log.2").exists(), "two files are kept");
    assert_eq!(begins(&log("cri-proxy.log")), 2, "each start is logged");
}

#[test]
fn usage_errors_exit_64_and_missing_binaries_are_named() {
    let run = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_quintctl")).args(args).output().unwrap();
    assert_eq!(run(&["up"]).status.code(), Some(64));
    assert_eq!(run(&["up", "--private-containerd", "--runtime-endpoint", "x"]).status.code(), Some(64));
    let misnamed = run(&["up", "--runtime-endpoint", "unix:///x", "--node-name", "Peer_Node"]);
    assert_eq!(misnamed.status.code(), Some(64));
    let error = String::from_utf8_lossy(&misnamed.stderr);
    assert!(error.contains("not a valid node name"), "{error}");
    let help = run(&["up", "--help"]);
    let help = String::from_utf8_lossy(&help.stdout);
    assert!(help.contains("--node-name") && !help.contains("--output"), "{help}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let output = run(&["up", "--runtime-endpoint", "unix:///x", "--base", &path, "--bin-dir", &path]);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("failed to find cri-proxy, pleg-service, probe-service, status-reporter, pod-sync in"),
        "{error}"
    );
}

/// A process named `kubelet` with this root directory.
fn kubelet(root_dir: &Path) -> Child {
    let argument = format!("--root-dir={}", root_dir.display());
    let mut command = Command::new("sh");
    command.arg0("kubelet").args(["-c", "sleep 60; :", &argument]);
    command.stdin(Stdio::null()).process_group(0).spawn().unwrap()
}

#[test]
fn a_second_agent_on_a_root_directory_does_not_start_and_names_the_first() {
    let up = |dir: &Path| {
        let output = Command::new(env!("CARGO_BIN_EXE_quintctl"))
            .args(["up", "--runtime-endpoint", "unix:///nowhere.sock", "--base"])
            .arg(dir)
            .arg("--bin-dir")
            .arg(dir.join("bin"))
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let mut node = Node::start(&[], "");
    let (code, error) = up(node.dir.path());
    assert_eq!(code, Some(69), "{error}");
    let first = format!(
        "quintctl: another quintctl up is running in {}, pid {} (",
        node.dir.path().display(),
        node.up.id()
    );
    assert!(error.starts_with(&first), "{error}");
    node.signal(Signal::SIGTERM);
    assert_eq!(node.end().0, Some(0));

    // The same programs with another base and the root directory of an agent that runs.
    let base = node.dir.path().to_owned();
    let root = base.join("root");
    std::fs::create_dir_all(&root).unwrap();
    std::fs::remove_file(base.join("up.lock")).unwrap();
    let mut first = kubelet(&root);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !std::fs::read_to_string(format!("/proc/{}/cmdline", first.id())).unwrap().starts_with("kubelet\0")
    {
        assert!(Instant::now() < deadline, "the shell is not executed");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (code, error) = up(&base);
    kill(Pid::from_raw(-first.id().cast_signed()), Signal::SIGKILL).unwrap();
    first.wait().unwrap();
    assert_eq!(code, Some(69), "{error}");
    let named = format!(
        "quintctl: {} is the root directory of a kubelet that runs, pid {} (kubelet -c",
        root.display(),
        first.id()
    );
    assert!(error.starts_with(&named), "{error}");
    assert!(!base.join("up.lock").exists(), "nothing is changed");

    let file = std::fs::File::create(root.join("quintlet-owner")).unwrap();
    let lock = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).unwrap();
    let (code, error) = up(&base);
    drop(lock);
    assert_eq!(code, Some(69), "{error}");
    let named = format!(
        "quintctl: {} is the root directory of another Quintlet that runs, pid {} (",
        root.display(),
        std::process::id()
    );
    assert!(error.starts_with(&named), "{error}");

    // Neither the lock file nor the command line of a dead process prevents a start.
    node.up = Node::up(&base, &[]);
    node.wait_for("ten starts", |notes| notes.iter().filter(|n| n.contains(" start ")).count() == 10);
    node.signal(Signal::SIGTERM);
    assert_eq!(node.end().0, Some(0));
}
