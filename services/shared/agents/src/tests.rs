use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use super::*;

/// A procfs and a root directory of files.
struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("proc")).unwrap();
        fs::create_dir_all(dir.path().join("var/lib/kubelet")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn process(&self, pid: u32, words: &[&str], exe: &str, root: &Path) {
        let process = self.path("proc").join(pid.to_string());
        fs::create_dir_all(&process).unwrap();
        let line: String = words.iter().flat_map(|word| [*word, "\0"]).collect();
        fs::write(process.join("cmdline"), line).unwrap();
        symlink(exe, process.join("exe")).unwrap();
        symlink(root, process.join("root")).unwrap();
    }

    fn table(&self) -> ProcessTable {
        ProcessTable::at(&self.path("proc"))
    }
}

#[test]
fn a_kubelet_is_found_by_its_root_directory_in_each_form_of_the_flag() {
    let machine = Machine::new();
    fs::create_dir_all(machine.path("data/kubelet")).unwrap();
    let (default, data) = (machine.path("var/lib/kubelet"), machine.path("data/kubelet"));
    let root = machine.dir.path();
    machine.process(7, &["/usr/bin/kubelet", "--v=2"], "/usr/bin/kubelet", root);
    machine.process(
        9,
        &["kubelet", "--root-dir", "/x", "--root-dir=/data/kubelet"],
        "/usr/bin/kubelet",
        root,
    );
    let found = |dir: &Path| machine.table().kubelet_of(dir).map(|process| process.to_string());
    assert_eq!(found(&default).as_deref(), Some("pid 7 (/usr/bin/kubelet --v=2)"));
    assert_eq!(
        found(&data).as_deref(),
        Some("pid 9 (kubelet --root-dir /x --root-dir=/data/kubelet)"),
        "the last flag counts"
    );
    symlink(&data, machine.path("link")).unwrap();
    assert!(found(&machine.path("link")).is_some(), "the same directory by another name");
    assert_eq!(found(&machine.path("absent")), None);
    assert_eq!(
        machine.table().agent_of(&default).unwrap().to_string(),
        format!(
            "{} is the root directory of a kubelet that runs, pid 7 (/usr/bin/kubelet --v=2): stop it (systemctl stop kubelet), or \
             choose another --root-dir",
            default.display()
        )
    );
}

#[test]
fn other_processes_and_kubelets_of_other_mount_namespaces_are_not_found() {
    let machine = Machine::new();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::create_dir_all(elsewhere.path().join("var/lib/kubelet")).unwrap();
    let root = machine.dir.path();
    machine.process(2, &["/usr/bin/kubelet"], "/usr/bin/kubelet", elsewhere.path());
    machine.process(3, &["kubelet", "--config=x"], "/usr/bin/quintlet", root);
    machine.process(4, &["/usr/bin/kubelet"], "/usr/bin/quintlet (deleted)", root);
    machine.process(7, &["kubelet"], "/usr/bin/quintlet-next (deleted)", root);
    machine.process(5, &["vi", "/usr/bin/kubelet"], "/usr/bin/vi", root);
    machine.process(6, &[], "/usr/bin/kubelet", root);
    fs::create_dir_all(machine.path("proc/net")).unwrap();
    assert_eq!(machine.table().agent_of(&machine.path("var/lib/kubelet")), None);
    assert_eq!(machine.table().kubelets().len(), 1, "that of the other namespace runs");
}

#[test]
fn a_kubelet_without_a_visible_process_is_found_by_a_socket_that_accepts() {
    let machine = Machine::new();
    let root = machine.path("var/lib/kubelet");
    let dir = root.join("pod-resources");
    fs::create_dir_all(&dir).unwrap();
    let listener = UnixListener::bind(dir.join("kubelet.sock")).unwrap();
    let found = machine.table().kubelet_of(&root);
    assert_eq!(found.map(|process| process.pid), Some(Some(std::process::id())));
    // Quintlet serves the socket, too.
    machine.process(std::process::id(), &["kubelet"], "/usr/bin/quintlet", machine.dir.path());
    assert_eq!(machine.table().kubelet_of(&root), None);
    fs::remove_dir_all(machine.path("proc").join(std::process::id().to_string())).unwrap();
    drop(listener);
    assert!(dir.join("kubelet.sock").exists());
    assert_eq!(machine.table().kubelet_of(&root), None, "a socket that a dead kubelet left");
}

#[test]
fn the_holder_of_the_lock_is_named_and_a_released_lock_has_no_holder() {
    let dir = tempfile::tempdir().unwrap();
    let table = ProcessTable::default();
    assert_eq!(table.quintlet_of(dir.path()), None);
    let file = fs::File::create(dir.path().join(LOCK_FILE)).unwrap();
    assert_eq!(table.quintlet_of(dir.path()), None, "a file without a lock");
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
    let found = table.agent_of(dir.path()).unwrap();
    assert!(
        matches!(&found, OtherAgent::Quintlet { process, .. } if process.pid == Some(std::process::id()) && !process.command.is_empty()),
        "{found:?}"
    );
    let elsewhere = ProcessTable::at(dir.path());
    let found = elsewhere.quintlet_of(dir.path()).unwrap();
    assert_eq!(
        (found.pid, found.to_string().as_str()),
        (None, "in another container or on the host"),
        "as a container sees it"
    );
    drop(lock);
    assert_eq!((table.quintlet_of(dir.path()), elsewhere.quintlet_of(dir.path())), (None, None));
}

#[test]
fn a_holder_that_exits_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let file = fs::File::create(dir.path().join(LOCK_FILE)).unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
    let exiting = std::thread::spawn(move || {
        std::thread::sleep(EXIT_PERIOD * 3);
        drop(lock);
    });
    assert_eq!(ProcessTable::default().agent_of(dir.path()), None);
    exiting.join().unwrap();
}

#[test]
fn a_long_command_line_is_cut_and_cannot_send_commands_to_a_terminal() {
    let machine = Machine::new();
    let long = "é".repeat(COMMAND_MAX);
    machine.process(7, &["/usr/bin/kubelet", "\x1b[2J", &long], "/usr/bin/kubelet", machine.dir.path());
    let command = machine.table().kubelets().remove(0).process.command;
    assert_eq!(command.chars().count(), COMMAND_MAX + 1);
    assert!(command.ends_with('…') && !command.contains('\x1b'));
    let arguments = ["--a".to_owned(), "1".to_owned(), "--a=2".to_owned(), "--ab=3".to_owned()];
    assert_eq!((value(&arguments, "--a"), value(&arguments, "--b")), (Some("2"), None));
}

/// Adds a kubeconfig with one server to the machine's files.
fn kubeconfig(machine: &Machine, name: &str, server: &str) {
    fs::write(machine.path(name), format!("clusters:\n- cluster:\n    server: {server}\n")).unwrap();
}

#[test]
fn a_kubelet_of_the_same_node_is_found_whatever_its_root_directory_is() {
    let machine = Machine::new();
    let root = machine.dir.path();
    kubeconfig(&machine, "a.conf", "https://a:6443");
    kubeconfig(&machine, "b.conf", "https://b:6443");
    let node = |name: &str, file: &str| NodeIdentity::new(name, &machine.path(file));
    let found = |node: &NodeIdentity| machine.table().agent_of_node(node).map(|other| other.to_string());
    machine.process(
        7,
        &["kubelet", "--kubeconfig=/a.conf", "--hostname-override=N1"],
        "/usr/bin/kubelet",
        root,
    );
    machine.process(8, &["kubelet", "--kubeconfig=/a.conf"], "/usr/bin/kubelet", root);
    machine.process(9, &["kubelet", "--hostname-override=n3"], "/usr/bin/kubelet", root);
    for (process, namespace) in [("self", "uts:[1]"), ("8", "uts:[1]")] {
        fs::create_dir_all(machine.path("proc").join(process).join("ns")).unwrap();
        symlink(namespace, machine.path("proc").join(process).join("ns/uts")).unwrap();
    }
    fs::create_dir_all(machine.path("proc/sys/kernel")).unwrap();
    fs::write(machine.path("proc/sys/kernel/hostname"), "host\n").unwrap();
    assert_eq!(
        found(&node("n1", "a.conf")).as_deref(),
        Some(
            "the node name n1 is that of another agent that runs on this machine, pid 7 (kubelet --kubeconfig=/a.conf \
             --hostname-override=N1): stop it, or choose another --node-name"
        )
    );
    assert!(found(&node("host", "a.conf")).is_some_and(|text| text.contains("pid 8 ")));
    for (name, file, why) in [
        ("n1", "b.conf", "another cluster"),
        ("n2", "a.conf", "another name"),
        ("n3", "a.conf", "a kubelet without an API server"),
        ("n1", "absent.conf", "no kubeconfig yet"),
    ] {
        assert_eq!(found(&node(name, file)), None, "{why}");
    }
    fs::remove_file(machine.path("proc/8/ns/uts")).unwrap();
    symlink("uts:[2]", machine.path("proc/8/ns/uts")).unwrap();
    assert_eq!(found(&node("host", "a.conf")), None, "a kubelet with another host name");
}

#[test]
fn a_quintlet_of_the_same_node_is_found_by_the_text_of_its_lock() {
    let machine = Machine::new();
    kubeconfig(&machine, "a.conf", "https://a:6443");
    let node = NodeIdentity::new("n1", &machine.path("a.conf"));
    let lock = machine.path("var/lib/kubelet").join(LOCK_FILE);
    fs::write(&lock, node.to_text()).unwrap();
    machine.process(7, &["pod-sync", "--node-name=n1"], "/usr/bin/quintlet", machine.dir.path());
    fs::create_dir_all(machine.path("proc/7/fd")).unwrap();
    symlink(&lock, machine.path("proc/7/fd/3")).unwrap();
    let locks = |inode: &str| {
        fs::write(machine.path("proc/locks"), format!("1: FLOCK  ADVISORY  WRITE 7 {inode} 0 EOF\n"))
            .unwrap();
    };
    locks("00:01:2");
    assert_eq!(machine.table().agent_of_node(&node), None, "the file is open and not locked");
    locks(&inode_name(&lock).unwrap());
    let other = machine.table().agent_of_node(&node);
    assert!(
        matches!(&other, Some(OtherAgent::NodeName { name, process }) if name == "n1" && process.pid == Some(7)),
        "{other:?}"
    );
    fs::write(&lock, "41").unwrap();
    assert_eq!(machine.table().agent_of_node(&node), None, "a Quintlet of an earlier release");
}
