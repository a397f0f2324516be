//! Upgrades on a machine of files: sockets of this process in the place of services, scripts in the place of
//! systemctl and of binaries.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;

use quintlet_kit::args::paths::{CriSocket, Paths};

use super::*;

const RUN_DIR: &str = "/run/quintlet";
const SERVICES: [&str; 6] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync", "node-api"];

/// Answers as quintctl: the version, and the health that the file `unhealthy` has.
const BINARY_SCRIPT: &str = "#!/bin/sh
case $1 in
    --version) echo 'quintctl VERSION' ;;
    --run-dir) [ ! -e STATE/unhealthy ] || { echo 'pod-sync  not serving'; exit 1; } ;;
esac
";

/// Records each call with the binary of the first and of the last service, fails at the calls whose numbers
/// are in `fail-at`, and makes the node unhealthy from the call on whose number is in `ill-from`.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$* $(readlink ROOT/usr/bin/cri-proxy) $(readlink ROOT/usr/bin/node-api)" >> STATE/calls
number=$(wc -l < STATE/calls)
if grep -qx "$number" STATE/ill-from; then touch STATE/unhealthy; fi
if grep -qx "$number" STATE/fail-at; then echo "Job of $1 $2 failed." >&2; exit 1; fi
"#;

struct Node {
    root: tempfile::TempDir,
    state: tempfile::TempDir,
    _sockets: Vec<UnixListener>,
}

impl Node {
    fn new() -> Self {
        let (root, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run = Paths::new(&root.path().join("run/quintlet"));
        let sockets = [
            run.cri(CriSocket::Read),
            run.pleg(),
            run.probe("probe-0"),
            run.status(),
            run.podsync(),
            run.node_api(),
        ];
        let bind = |path: &std::path::PathBuf| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            UnixListener::bind(path).unwrap()
        };
        let sockets = sockets.iter().map(bind).collect();
        let node = Self { root, state, _sockets: sockets };
        node.process("cgroup", "0::/system.slice/quintlet-node.service\n");
        node.program("/usr/bin/quintlet");
        node.binary("usr/bin/quintlet", "1.0.0");
        node.binary("root/new", "1.1.0");
        for name in SERVICES.iter().chain(&["quintctl"]) {
            symlink("quintlet", node.root.path().join("usr/bin").join(name)).unwrap();
        }
        fs::create_dir_all(node.root.path().join("var/lib")).unwrap();
        for name in ["calls", "fail-at", "ill-from"] {
            fs::write(node.state.path().join(name), "").unwrap();
        }
        let script = SYSTEMCTL.replace("ROOT", node.root.path().to_str().unwrap());
        node.script(&node.state.path().join("systemctl"), &script);
        node
    }

    fn process(&self, name: &str, text: &str) {
        let dir = self.root.path().join("proc").join(std::process::id().to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), text).unwrap();
    }

    /// Sets the program of the process of all services, as the kernel shows it.
    fn program(&self, path: &str) {
        let link = self.root.path().join("proc").join(std::process::id().to_string()).join("exe");
        // There may be none yet.
        let _ = fs::remove_file(&link);
        symlink(path, link).unwrap();
    }

    fn binary(&self, name: &str, version: &str) {
        self.script(&self.root.path().join(name), &BINARY_SCRIPT.replace("VERSION", version));
    }

    fn script(&self, path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text.replace("STATE", self.state.path().to_str().unwrap())).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn machine(&self) -> Machine {
        Machine {
            root: self.root.path().to_owned(),
            systemctl: self.state.path().join("systemctl"),
            bin_dir: "/usr/bin".into(),
            is_root: true,
            host_name: "n1".to_owned(),
            journal_name: UPGRADE_JOURNAL,
        }
    }

    fn upgrade(&self, args: &UpgradeArgs) -> (Result<(), InstallError>, String) {
        let mut out = Vec::new();
        let done = upgrade(args, Path::new(RUN_DIR), &self.machine(), &mut out);
        (done, String::from_utf8(out).unwrap())
    }

    fn set(&self, name: &str, text: &str) {
        fs::write(self.state.path().join(name), text).unwrap();
    }

    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.state.path().join("calls")).unwrap();
        self.set("calls", "");
        calls.lines().map(str::to_owned).collect()
    }

    /// Returns the files of the directory of programs, with mode and content or target, without the binary
    /// that an upgrade keeps.
    fn programs(&self) -> Vec<(String, u32, String)> {
        let entries = fs::read_dir(self.root.path().join("usr/bin")).unwrap();
        let mut programs: Vec<_> = entries
            .map(|entry| {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let content = match fs::read_link(&path) {
                    Ok(target) => target.display().to_string(),
                    Err(_) => fs::read_to_string(&path).unwrap(),
                };
                (name, metadata.mode(), content)
            })
            .filter(|(name, ..)| name != crate::swap::PREVIOUS)
            .collect();
        programs.sort();
        programs
    }

    fn version_of(&self, name: &str) -> String {
        let text = fs::read_to_string(self.root.path().join("usr/bin").join(name)).unwrap();
        if text.contains("1.1.0") { "new".to_owned() } else { "old".to_owned() }
    }

    fn has_journal(&self) -> bool {
        self.root.path().join("var/lib/quintlet").exists()
    }
}

fn args() -> UpgradeArgs {
    UpgradeArgs { binary: Some("/root/new".into()), undo: false, dry_run: false, bin_dir: None, timeout: 0 }
}

fn going_back() -> UpgradeArgs {
    UpgradeArgs { binary: None, undo: true, ..args() }
}

#[test]
fn a_dry_run_shows_the_steps_in_the_order_of_the_services_and_changes_nothing() {
    let node = Node::new();
    let before = node.programs();
    let (done, text) = node.upgrade(&UpgradeArgs { dry_run: true, ..args() });
    done.unwrap();
    let want = "\
Upgrade from 1.0.0 to 1.1.0:
  1. copy /root/new to /usr/bin/quintlet-next
     undo: remove /usr/bin/quintlet-next
  2. link /usr/bin/cri-proxy to quintlet-next and restart quintlet-node.service
     undo: link /usr/bin/cri-proxy to quintlet and restart quintlet-node.service
  3. wait until all services are healthy, 0 s at most
     undo: nothing
  4. link /usr/bin/pleg-service to quintlet-next and restart quintlet-node.service
";
    assert!(text.starts_with(want), "{text}");
    let last = "\
 14. rename /usr/bin/quintlet-next to quintlet, and keep the old binary as quintlet-previous
     undo: rename /usr/bin/quintlet-previous to quintlet
";
    assert!(text.ends_with(last), "{text}");
    assert_eq!((node.programs(), node.calls(), node.has_journal()), (before, Vec::new(), false));
}

#[test]
fn each_service_is_restarted_with_the_new_binary_which_then_has_the_name_of_the_old_one() {
    let node = Node::new();
    let names = |node: &Node| node.programs().into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
    let before = names(&node);
    node.upgrade(&args()).0.unwrap();
    let calls = node.calls();
    assert_eq!(calls.len(), SERVICES.len(), "{calls:#?}");
    assert_eq!(calls.first().unwrap(), "restart quintlet-node.service quintlet-next quintlet");
    assert_eq!(calls.last().unwrap(), "restart quintlet-node.service quintlet-next quintlet-next");
    assert_eq!(names(&node), before);
    for name in SERVICES {
        assert_eq!(node.version_of(name), "new", "{name}");
    }
    assert_eq!(node.version_of("quintlet-previous"), "old");
    assert!(!node.has_journal());

    let (again, _) = node.upgrade(&args());
    let again = again.unwrap_err();
    assert_eq!(
        (again.exit_code(), again.to_string().as_str()),
        (64, "the new binary is the one that is installed")
    );
    let back = UpgradeArgs { binary: Some("/usr/bin/quintlet-previous".into()), ..args() };
    node.upgrade(&back).0.unwrap();
    assert_eq!(
        (node.version_of("pod-sync"), node.version_of("quintlet-previous")),
        ("old".into(), "new".into())
    );
}

#[test]
fn a_failure_at_any_restart_makes_all_services_run_the_old_binary_again() {
    for call in 1..=SERVICES.len() {
        let node = Node::new();
        let before = node.programs();
        node.set("fail-at", &format!("{call}\n"));
        let (done, text) = node.upgrade(&args());
        let error = done.unwrap_err().to_string();
        assert!(
            error.ends_with("Job of restart quintlet-node.service failed.; the steps before it are undone"),
            "{error}"
        );
        assert_eq!(node.programs(), before, "{text}");
        let calls = node.calls();
        assert_eq!(calls.len(), 2 * call, "{calls:#?}");
        assert_eq!(calls.last().unwrap(), "restart quintlet-node.service quintlet quintlet");
        assert!(!node.has_journal());
    }
}

#[test]
fn a_service_that_does_not_become_healthy_ends_the_upgrade() {
    let node = Node::new();
    let before = node.programs();
    node.set("ill-from", "2\n");
    let (done, _) = node.upgrade(&args());
    let error = done.unwrap_err().to_string();
    assert_eq!(
        error,
        "failed to wait until all services are healthy, 0 s at most: the services are not healthy after 0 s: pod-sync  not serving; the \
         steps before it are undone"
    );
    assert_eq!((node.programs(), node.calls().len()), (before, 4));

    let (done, _) = node.upgrade(&args());
    let error = done.unwrap_err().to_string();
    assert!(error.starts_with("the services are not healthy before the upgrade"), "{error}");
}

#[test]
fn an_upgrade_that_is_killed_after_any_step_is_undone_on_request() {
    for steps in 0..=14 {
        let node = Node::new();
        let before = node.programs();
        let machine = node.machine();
        let facts = upgrade_facts::survey(Path::new("/root/new"), Path::new(RUN_DIR), &machine);
        assert_eq!(refusals(&facts, &machine), Vec::new());
        let plan = plan(&facts, "/root/new".into(), Path::new(RUN_DIR), &machine, 0);
        let mut execution = Execution::begin(plan, &machine).unwrap();
        for _ in 0..steps {
            assert!(execution.advance(&mut Vec::new()).unwrap());
        }
        drop(execution);
        let (again, _) = node.upgrade(&args());
        let error = again.unwrap_err().to_string();
        assert!(error.contains("run quintctl upgrade --undo first"), "{error}");
        let (done, text) = node.upgrade(&going_back());
        done.unwrap();
        assert_eq!(node.programs(), before, "after {steps} steps: {text}");
        assert!(!node.has_journal());
        assert_eq!(node.upgrade(&going_back()).0.unwrap_err().exit_code(), 1);
    }
}

// The binary before the old one is still there from an earlier upgrade.
#[test]
fn an_upgrade_that_is_killed_before_it_renames_keeps_the_old_binary() {
    let node = Node::new();
    node.binary("usr/bin/quintlet-previous", "0.9.0");
    let before = node.programs();
    let machine = node.machine();
    let facts = upgrade_facts::survey(Path::new("/root/new"), Path::new(RUN_DIR), &machine);
    let plan = plan(&facts, "/root/new".into(), Path::new(RUN_DIR), &machine, 0);
    let mut execution = Execution::begin(plan, &machine).unwrap();
    for _ in 0..13 {
        assert!(execution.advance(&mut Vec::new()).unwrap());
    }
    drop(execution);
    let mut journal = Journal::read(&machine).unwrap().unwrap();
    journal.set_begun(14, &machine).unwrap();
    node.upgrade(&going_back()).0.unwrap();
    assert_eq!(node.programs(), before);
}

#[test]
fn an_upgrade_whose_way_back_fails_keeps_its_journal() {
    let node = Node::new();
    let before = node.programs();
    node.set("fail-at", "2\n4\n");
    let error = node.upgrade(&args()).0.unwrap_err().to_string();
    assert!(error.contains("remove the cause, then run quintctl upgrade --undo"), "{error}");
    assert!(node.has_journal());
    node.set("fail-at", "");
    node.upgrade(&going_back()).0.unwrap();
    assert_eq!(node.programs(), before);
}

#[test]
fn services_that_no_unit_and_no_quintctl_up_restarts_are_refused() {
    let node = Node::new();
    let refusal = |node: &Node| node.upgrade(&args()).0.unwrap_err().to_string();
    node.process("cgroup", "0::/system.slice/docker.service\n");
    node.process("status", "Name:\tx\nPPid:\t7\n");
    assert!(refusal(&node).contains("runs neither in a unit of Quintlet nor under quintctl up"));
    let parent = node.root.path().join("proc/7");
    fs::create_dir_all(&parent).unwrap();
    for (line, is_supervised) in [
        ("/usr/bin/quintctl\0up\0--base\0x", true),
        ("kubelet\0--v=2", true),
        ("quintctl\0health", false),
        ("sh\0up", false),
    ] {
        fs::write(parent.join("cmdline"), line).unwrap();
        let (done, text) = node.upgrade(&UpgradeArgs { dry_run: true, ..args() });
        assert_eq!(done.is_ok(), is_supervised, "{line} {done:?}");
        assert_eq!(
            text.contains("end the process that serves /run/quintlet/podsync/podsync.sock"),
            is_supervised,
            "{text}"
        );
    }
    assert_eq!(node.calls(), [""; 0]);
}

#[test]
fn services_that_run_programs_of_another_directory_are_refused_by_name() {
    let node = Node::new();
    let dry = || node.upgrade(&UpgradeArgs { dry_run: true, ..args() }).0;
    for program in ["/usr/bin/quintlet-next", "/usr/bin/quintlet (deleted)"] {
        node.program(program);
        dry().unwrap();
    }
    node.program("/opt/quintlet/quintlet");
    let error = dry().unwrap_err().to_string();
    for name in SERVICES {
        let pid = std::process::id();
        let line = format!(
            "{name}: pid {pid} runs /opt/quintlet/quintlet, which is not in /usr/bin: use the quintctl of that directory, or \
             --bin-dir /opt/quintlet"
        );
        assert!(error.contains(&line), "{error}");
    }
    // The directory of programs may be a link.
    fs::create_dir_all(node.root.path().join("opt")).unwrap();
    fs::rename(node.root.path().join("usr/bin"), node.root.path().join("opt/quintlet")).unwrap();
    symlink("../opt/quintlet", node.root.path().join("usr/bin")).unwrap();
    dry().unwrap();
}

#[test]
fn only_root_begins_an_upgrade_or_undoes_one() {
    let node = Node::new();
    let machine = Machine { is_root: false, ..node.machine() };
    for args in [args(), going_back(), UpgradeArgs { dry_run: true, ..going_back() }] {
        let error = upgrade(&args, Path::new(RUN_DIR), &machine, &mut Vec::new()).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().contains("only root can restart")), (1, true));
    }
}

#[test]
fn programs_that_are_no_links_and_binaries_that_are_none_are_refused() {
    let node = Node::new();
    let pod_sync = node.root.path().join("usr/bin/pod-sync");
    fs::remove_file(&pod_sync).unwrap();
    node.binary("usr/bin/pod-sync", "1.0.0");
    node.script(&node.root.path().join("root/new"), "#!/bin/sh\necho 'no such program' >&2; exit 64\n");
    let error = node.upgrade(&args()).0.unwrap_err();
    assert_eq!(error.exit_code(), 64);
    let text = error.to_string();
    assert!(text.contains("/usr/bin/pod-sync is not a link to the binary quintlet beside it"), "{text}");
    assert!(
        text.contains("root/new is not a binary of Quintlet for this machine: no such program"),
        "{text}"
    );
    let none = UpgradeArgs { binary: Some("/root/absent".into()), ..args() };
    let text = node.upgrade(&none).0.unwrap_err().to_string();
    assert!(text.contains("No such file or directory"), "{text}");
}
