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
