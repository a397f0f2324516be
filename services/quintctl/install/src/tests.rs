//! Installations on a machine of files: a root directory, a procfs, and scripts in the place of systemctl and
//! of Quintlet.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use clap::Parser;

use super::*;

const DROP_IN: &str = "/etc/systemd/system/kubelet.service.d/zz-quintlet.conf";

/// Keeps the state of units in files, records what changes it, and fails at the calls whose numbers are in
/// `fail-at`.
const SYSTEMCTL: &str = r#"#!/bin/sh
case $1 in
    show) cat STATE/show; exit ;;
    list-units) cat STATE/list; exit ;;
esac
echo "$*" >> STATE/calls
if grep -qx "$(wc -l < STATE/calls)" STATE/fail-at; then echo "Job of $1 $2 failed." >&2; exit 1; fi
case $1 in
    start) touch STATE/units/active-$2 ;;
    stop) rm -f STATE/units/active-$2 ;;
    enable) touch STATE/units/enabled-$2 ;;
    disable) rm -f STATE/units/enabled-$2 ;;
esac
"#;

/// Prints the settings, or the problems and exits with the code in `check-code`.
const CHECK: &str = r#"#!/bin/sh
echo "$*" >> STATE/checks
[ ! -e STATE/check-code ] || { cat STATE/check-errors >&2; exit $(cat STATE/check-code); }
case "$*" in
    *quintlet-beside*) cat STATE/beside.json ;;
    *) cat STATE/node.json ;;
esac
"#;

const HEALTH: &str = "#!/bin/sh\n[ \"$1 $3\" = '--run-dir health' ] && [ ! -e STATE/unhealthy ] || { echo 'pod-sync  not serving'; exit 1; }\n";

#[derive(Parser)]
struct InstallCli {
    #[command(flatten)]
    args: InstallArgs,
}

fn args(line: &str) -> InstallArgs {
    InstallCli::try_parse_from(std::iter::once("install").chain(line.split_whitespace())).unwrap().args
}

fn replace() -> InstallArgs {
    args("--replace-kubelet --timeout 0")
}

fn beside() -> InstallArgs {
    args("--beside --runtime-endpoint unix:///run/other.sock --timeout 0")
}

/// A node of kubeadm with a kubelet that systemd runs.
struct Node {
    root: tempfile::TempDir,
    state: tempfile::TempDir,
}

/// Files with mode and content, and the states of the units.
type Snapshot = (BTreeMap<String, (u32, String)>, Vec<String>);

impl Node {
    fn new() -> Self {
        let node = Self { root: tempfile::tempdir().unwrap(), state: tempfile::tempdir().unwrap() };
        for dir in ["run/systemd/system", "etc/systemd/system", "var/lib/kubelet", "proc/812/fd", "proc/net"]
        {
            fs::create_dir_all(node.root.path().join(dir)).unwrap();
        }
        for name in [
            "cri-proxy",
            "pleg-service",
            "probe-service",
            "status-reporter",
            "node-api",
            "pod-sync",
            "kubelet",
        ] {
            node.file(&format!("usr/bin/{name}"), "");
        }
        let units = "usr/lib/systemd/system/kubelet.service";
        node.file(units, "[Service]\nExecStart=/usr/bin/kubelet\nRestart=always\n");
        node.file(
            &format!("{units}.d/10-kubeadm.conf"),
            "[Service]\nEnvironment=\"KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml\"\n\
             EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\nExecStart=\n\
             ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS\n",
        );
        node.file("var/lib/kubelet/kubeadm-flags.env", "KUBELET_KUBEADM_ARGS=\"--node-ip=10.0.0.1\"\n");
        node.file("proc/812/cmdline", "/usr/bin/kubelet\0--config=/var/lib/kubelet/config.yaml\0");
        symlink("/usr/bin/kubelet", node.root.path().join("proc/812/exe")).unwrap();
        symlink(node.root.path(), node.root.path().join("proc/812/root")).unwrap();
        symlink("socket:[555]", node.root.path().join("proc/812/fd/3")).unwrap();
        node.listen(10250, 555);
        node.state("list", "");
        node.state("fail-at", "");
        node.state("calls", "");
        node.show(812);
        node.state("units/active-kubelet.service", "");
        node.state("units/enabled-kubelet.service", "");
        node.state(
            "node.json",
            &settings("/var/lib/kubelet", "n1", "unix:///run/containerd/containerd.sock", 10250),
        );
        node.state(
            "beside.json",
            &settings("/var/lib/quintlet-beside/root", "n1-quintlet", "unix:///run/other.sock", 10350),
        );
        node.script("usr/bin/quintlet", CHECK);
        node.script("usr/bin/quintctl", HEALTH);
        fs::write(
            node.state.path().join("systemctl"),
            SYSTEMCTL.replace("STATE", node.state.path().to_str().unwrap()),
        )
        .unwrap();
        fs::set_permissions(node.state.path().join("systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
        node
    }

    fn machine(&self) -> Machine {
        Machine {
            root: self.root.path().to_owned(),
            systemctl: self.state.path().join("systemctl"),
            bin_dir: "/usr/bin".into(),
            is_root: true,
            host_name: "n1".to_owned(),
            journal_name: machine::INSTALL_JOURNAL,
        }
    }

    fn file(&self, name: &str, content: &str) {
        let path = self.root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn script(&self, name: &str, text: &str) {
        self.file(name, &text.replace("STATE", self.state.path().to_str().unwrap()));
        fs::set_permissions(self.root.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn state(&self, name: &str, content: &str) {
        let path = self.state.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn show(&self, main_pid: u32) {
        self.state(
            "show",
            &format!(
                "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nMainPID={main_pid}\n\
                 FragmentPath=/usr/lib/systemd/system/kubelet.service\n\
                 DropInPaths=/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf\n"
            ),
        );
    }

    fn listen(&self, port: u16, inode: u32) {
        let line = format!(
            "   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
        );
        self.file("proc/net/tcp6", &line);
    }

    /// Returns the calls of systemctl that change something, since the last time.
    fn calls(&self) -> Vec<String> {
        let path = self.state.path().join("calls");
        let calls = fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
        fs::write(path, "").unwrap();
        calls
    }

    fn snapshot(&self) -> Snapshot {
        let mut files = BTreeMap::new();
        collect(self.root.path(), self.root.path(), &mut files);
        let units = fs::read_dir(self.state.path().join("units")).unwrap();
        let mut units: Vec<String> =
            units.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        units.sort();
        (files, units)
    }

    fn install(&self, args: &InstallArgs) -> (Result<(), InstallError>, String) {
        let mut out = Vec::new();
        let done = super::install(args, &self.machine(), &mut out);
        (done, String::from_utf8(out).unwrap())
    }

    fn uninstall(&self) -> (Result<(), InstallError>, String) {
        let mut out = Vec::new();
        let done = super::uninstall(&UninstallArgs::default(), &self.machine(), &mut out);
        (done, String::from_utf8(out).unwrap())
    }
}

fn settings(root_dir: &str, name: &str, endpoint: &str, port: u16) -> String {
    format!(
        r#"{{"rootDir": "{root_dir}", "nodeName": "{name}", "runDir": "/run/quintlet", "runtimeEndpoint": "{endpoint}",
            "cgroupDriver": "systemd", "runtimeCgroupDriver": "systemd", "runtimeError": null, "ports": {{"port": {port}}}}}"#
    )
}

fn collect(root: &Path, dir: &Path, files: &mut BTreeMap<String, (u32, String)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let content = match &metadata {
            metadata if metadata.is_dir() => String::new(),
            metadata if metadata.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
            _ => fs::read_to_string(&path).unwrap(),
        };
        files.insert(name, (metadata.mode(), content));
        if metadata.is_dir() {
            collect(root, &path, files);
        }
    }
}

#[test]
fn a_dry_run_shows_each_step_with_its_undo_and_changes_nothing() {
    let node = Node::new();
    let before = node.snapshot();
    let (done, text) = node.install(&args("--replace-kubelet --dry-run"));
    done.unwrap();
    let want = "\
Steps of the installation:
  1. stop kubelet.service
     undo: start kubelet.service
  2. create /etc/systemd/system/kubelet.service.d
     undo: remove /etc/systemd/system/kubelet.service.d if it is empty
  3. write /etc/systemd/system/kubelet.service.d/zz-quintlet.conf and reload systemd
     undo: remove /etc/systemd/system/kubelet.service.d/zz-quintlet.conf and reload systemd
     | # Written by quintctl install --replace-kubelet, and removed by quintctl uninstall.
";
    assert!(text.starts_with(want), "{text}");
    let command = "     | ExecStart=@/usr/bin/quintlet kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS\n";
    assert!(text.contains(&format!("     | ExecStart=\n{command}")), "{text}");
    assert!(
        text.ends_with(
            "  4. start kubelet.service\n     undo: stop kubelet.service\n  5. wait until all services are healthy, 60 s at most\n     \
             undo: nothing\n"
        ),
        "{text}"
    );
    assert_eq!(node.snapshot(), before);
    assert_eq!(node.calls(), [""; 0]);
    let checks = fs::read_to_string(node.state.path().join("checks")).unwrap();
    assert_eq!(checks, "kubelet --check --config=/var/lib/kubelet/config.yaml --node-ip=10.0.0.1\n");
}

#[test]
fn the_steps_of_a_dry_run_are_those_that_are_done() {
    for args in [replace(), beside()] {
        let node = Node::new();
        let (_, shown) = node.install(&InstallArgs { dry_run: true, ..args.clone() });
        let steps: Vec<String> = shown
            .lines()
            .filter(|line| !line.contains('|'))
            .filter_map(|line| line.trim_start().split_once(". "))
            .map(|(_, step)| step.to_owned())
            .collect();
        let (done, text) = node.install(&args);
        done.unwrap();
        let did = text
            .lines()
            .filter_map(|line| line.strip_suffix(" … done")?.split_once(' '))
            .map(|(_, step)| step.to_owned());
        assert_eq!(did.collect::<Vec<_>>(), steps);
    }
}

#[test]
fn an_uninstall_gives_back_the_machine_as_it_was() {
    let replaced = ["stop kubelet.service", "daemon-reload", "start kubelet.service"];
    let added = ["daemon-reload", "enable quintlet-beside.service", "start quintlet-beside.service"];
    let removed = ["stop quintlet-beside.service", "disable quintlet-beside.service", "daemon-reload"];
    for (args, did, undid) in [(replace(), replaced, replaced), (beside(), added, removed)] {
        let node = Node::new();
        let before = node.snapshot();
        node.install(&args).0.unwrap();
        assert_eq!(node.calls(), did);
        assert_ne!(node.snapshot(), before);
        let (again, _) = node.install(&args);
        assert!(again.unwrap_err().to_string().contains("run quintctl uninstall first"));

        let mut out = Vec::new();
        super::uninstall(&UninstallArgs { dry_run: true }, &node.machine(), &mut out).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.starts_with("Steps that would be undone:\n  1. stop "), "{shown}");
        assert_eq!(node.calls(), [""; 0]);

        let (done, text) = node.uninstall();
        done.unwrap();
        assert!(text.ends_with("Quintlet is uninstalled.\n"), "{text}");
        assert_eq!(node.calls(), undid);
        assert_eq!(node.snapshot(), before);
        let (again, _) = node.uninstall();
        assert_eq!((again.unwrap_err().exit_code(), node.calls()), (1, Vec::new()));
    }
}

#[test]
fn a_stopped_and_disabled_kubelet_is_stopped_and_disabled_again() {
    let node = Node::new();
    let shown = fs::read_to_string(node.state.path().join("show")).unwrap();
    let shown = shown.replace("ActiveState=active", "ActiveState=inactive").replace("=enabled", "=disabled");
    node.state("show", &shown.replace("MainPID=812", "MainPID=0"));
    fs::remove_dir_all(node.root.path().join("proc/812")).unwrap();
    node.file("proc/net/tcp6", "");
    for name in ["active", "enabled"] {
        fs::remove_file(node.state.path().join(format!("units/{name}-kubelet.service"))).unwrap();
    }
    let before = node.snapshot();
    node.install(&replace()).0.unwrap();
    assert_eq!(node.calls(), ["daemon-reload", "enable kubelet.service", "start kubelet.service"]);
    node.uninstall().0.unwrap();
    assert_eq!(node.snapshot(), before);
}

#[test]
fn a_failure_at_any_call_undoes_all_steps_before_it() {
    for args in [replace(), beside()] {
        for number in 1..=3 {
            let node = Node::new();
            let before = node.snapshot();
            node.state("fail-at", &format!("{number}\n"));
            let (done, text) = node.install(&args);
            let error = done.unwrap_err();
            assert!(matches!(error, InstallError::Undone { .. }), "{number}: {error}");
            assert!(error.to_string().contains("failed: Job of"), "{error}");
            assert!(text.contains("… failed\n"), "{text}");
            assert_eq!(node.snapshot(), before, "call {number} failed");
        }
        let node = Node::new();
        let before = node.snapshot();
        node.state("unhealthy", "");
        let error = node.install(&args).0.unwrap_err();
        assert_eq!(
            error.to_string(),
            "failed to wait until all services are healthy, 0 s at most: the services are not healthy after 0 s: pod-sync  not \
             serving; the steps before it are undone"
        );
        assert_eq!((node.snapshot(), error.exit_code()), (before, 1));
    }
}

#[test]
fn a_file_that_cannot_be_written_undoes_the_steps_before_it() {
    let node = Node::new();
    node.file("etc/systemd/system/kubelet.service.d", "not a directory");
    let before = node.snapshot();
    let error = node.install(&replace()).0.unwrap_err();
    assert!(error.to_string().contains(&format!("failed to write {DROP_IN}")), "{error}");
    assert_eq!(node.snapshot(), before);
}

#[test]
fn a_kill_at_any_step_leaves_what_uninstall_needs() {
    for args in [replace(), beside()] {
        let mut cuts = 0;
        let mut is_whole = false;
        while !is_whole {
            for is_begun in [false, true] {
                let node = Node::new();
                let before = node.snapshot();
                let machine = node.machine();
                let plan = planned(&args, &machine);
                let mut execution = Execution::begin(plan, &machine).unwrap();
                for _ in 0..cuts {
                    assert!(execution.advance(&mut Vec::new()).unwrap());
                }
                drop(execution);
                let mut journal = Journal::read(&machine).unwrap().unwrap();
                is_whole = journal.next().is_none();
                if is_begun && !is_whole {
                    journal.set_begun(cuts + 1, &machine).unwrap();
                }
                node.uninstall().0.unwrap();
                assert_eq!(node.snapshot(), before, "after {cuts} steps, the next begun: {is_begun}");
            }
            cuts += 1;
        }
        assert!(cuts >= 5, "{cuts}");
    }
}

#[test]
fn a_removal_that_fails_or_is_killed_continues_with_the_next_one() {
    let node = Node::new();
    let before = node.snapshot();
    node.install(&replace()).0.unwrap();
    node.calls();
    // The reload fails, and the kubelet starts nevertheless.
    node.state("fail-at", "2\n");
    let error = node.uninstall().0.unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to undo: systemctl daemon-reload failed: Job of daemon-reload  failed.; remove the cause, then run quintctl uninstall"
    );
    assert_eq!(node.calls().last().map(String::as_str), Some("start kubelet.service"));
    node.state("fail-at", "");
    node.uninstall().0.unwrap();
    assert_eq!(node.snapshot(), before);

    node.install(&replace()).0.unwrap();
    let mut journal = Journal::read(&node.machine()).unwrap().unwrap();
    let begun = journal.begun().to_vec();
    for (index, step) in begun.iter().enumerate().skip(2).rev() {
        step.undo(&node.machine()).unwrap();
        journal.set_begun(index, &node.machine()).unwrap();
    }
    node.uninstall().0.unwrap();
    assert_eq!(node.snapshot(), before);
}

#[test]
fn files_that_appeared_since_and_a_changed_journal_are_safe() {
    let node = Node::new();
    node.install(&replace()).0.unwrap();
    node.file("etc/systemd/system/kubelet.service.d/20-admin.conf", "[Service]\n");
    let (done, text) = node.uninstall();
    done.unwrap();
    assert!(text.contains("kept /etc/systemd/system/kubelet.service.d\n"), "{text}");

    fs::remove_file(node.root.path().join("etc/systemd/system/kubelet.service.d/20-admin.conf")).unwrap();
    node.install(&replace()).0.unwrap();
    let path = node.root.path().join("var/lib/quintlet/install.json");
    let journal = fs::read_to_string(&path).unwrap();
    fs::write(&path, journal.replace("kubelet.service.d/zz-quintlet.conf", "other.service")).unwrap();
    node.file("etc/systemd/system/other.service", "mine");
    assert!(matches!(node.uninstall().0, Err(InstallError::NotUndone(_))));
    assert!(node.root.path().join("etc/systemd/system/other.service").exists());
    fs::write(&path, "{").unwrap();
    assert!(matches!(node.uninstall().0, Err(InstallError::Journal(_))));
}

#[test]
fn problems_of_the_files_have_their_exit_codes_and_nothing_changes() {
    for (code, text) in [
        (64, "/etc/kubernetes/pki/ca.crt is empty: x"),
        (69, "/etc/kubernetes/kubelet.conf does not exist: x"),
    ] {
        let node = Node::new();
        node.state("check-code", &code.to_string());
        node.state("check-errors", &format!("kubelet: {text}\n"));
        let before = node.snapshot();
        let error = node.install(&replace()).0.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.exit_code()), (text, code));
        assert_eq!((node.snapshot(), node.calls()), (before, Vec::new()));
    }
}

#[test]
fn a_second_kubelet_and_a_foreign_port_are_seen() {
    let node = Node::new();
    node.show(5);
    let text = node.install(&replace()).0.unwrap_err().to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "a kubelet that is not kubelet.service uses the same root directory, pid 812 (/usr/bin/kubelet \
             --config=/var/lib/kubelet/config.yaml): stop it",
            "quintctl: port 10250 (port) is in use by pid 812 (/usr/bin/kubelet): change it in the configuration of the kubelet, or \
             stop the process",
        ]
    );
    assert_eq!(node.calls(), [""; 0]);

    let node = Node::new();
    fs::copy(node.state.path().join("node.json"), node.state.path().join("beside.json")).unwrap();
    let error = node.install(&beside()).0.unwrap_err();
    assert_eq!(error.exit_code(), 64, "the same runtime and name");
    assert_eq!(error.to_string().lines().count(), 4, "{error}");
}

#[test]
fn the_unit_beside_a_kubelet_names_all_that_is_its_own() {
    let node = Node::new();
    let (done, text) = node.install(&args(
        "--beside --runtime-endpoint unix:///run/other.sock --node-name n2 --config /etc/q.yaml --kubeconfig /etc/k --dry-run",
    ));
    done.unwrap();
    for word in [
        "ExecStart=@/usr/bin/quintlet kubelet \\",
        "--root-dir=/var/lib/quintlet-beside/root \\",
        "--pod-manifest-path=/var/lib/quintlet-beside/manifests \\",
        "--run-dir=/run/quintlet-beside \\",
        "--pod-logs-dir=/var/log/quintlet-beside/pods \\",
        "--container-logs-dir=/var/log/quintlet-beside/containers \\",
        "--cgroup-root=/quintlet-beside \\",
        "--hostname-override=n2 \\",
        "--port=10350 \\",
        "--healthz-port=10348 \\",
        "--container-runtime-endpoint=unix:///run/other.sock \\",
        "--config=/etc/q.yaml \\",
        "--kubeconfig=/etc/k",
    ] {
        assert!(text.lines().any(|line| line.trim_start_matches(['|', ' ']) == word), "{word}: {text}");
    }
    for line in
        ["--beside", "--replace-kubelet --beside --runtime-endpoint x", "--replace-kubelet --node-name x", ""]
    {
        let words = std::iter::once("install").chain(line.split_whitespace());
        assert!(InstallCli::try_parse_from(words).is_err(), "{line}");
    }
}

fn planned(args: &InstallArgs, machine: &Machine) -> InstallPlan {
    match args.replace_kubelet {
        true => plan::replace(args, machine, &facts::replace(machine).unwrap()),
        false => plan::beside(args, machine, &facts::beside_kubelet(args, machine).unwrap()),
    }
}
