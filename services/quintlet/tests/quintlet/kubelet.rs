//! The program in the place of a kubelet: its version, its command line, and the files of kubeadm.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

const PROGRAM: &str = env!("CARGO_BIN_EXE_quintlet");
const SERVICES: [&str; 6] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync", "node-api"];

/// Writes its arguments to a file of its own, and waits.
const SERVICE: &str = "#!/bin/sh\necho \"$@\" > ARGS/$(basename \"$0\").new\nmv ARGS/$(basename \"$0\").new ARGS/$(basename \"$0\")\n\
                       trap 'exit 0' TERM\nwhile :; do sleep 0.05; done\n";

/// An authority, and a client of it with its key.
struct Cluster {
    authority: String,
    client: String,
}

impl Cluster {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.distinguished_name.push(DnType::CommonName, "kubernetes");
        let pem = authority.self_signed(&key).unwrap().pem();
        let issuer = Issuer::from_params(&authority, &key);
        let mut client = CertificateParams::default();
        client.use_authority_key_identifier_extension = true;
        let client_key = KeyPair::generate().unwrap();
        let certificate = client.signed_by(&client_key, &issuer).unwrap().pem();
        Self { authority: pem, client: format!("{certificate}{}", client_key.serialize_pem()) }
    }

    fn kubeconfig(&self, user: &str) -> String {
        let authority = base64::engine::general_purpose::STANDARD.encode(&self.authority);
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: \"https://10.0.0.9:6443\", certificate-authority-data: {authority}}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        )
    }
}

/// A node as kubeadm leaves it, below a temporary directory.
struct Node {
    dir: tempfile::TempDir,
    cluster: Cluster,
}

impl Node {
    fn new() -> Self {
        let node = Self { dir: tempfile::tempdir().unwrap(), cluster: Cluster::new() };
        // The services run as separate users, which need access.
        std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let pem = node.path("var/lib/kubelet/pki/kubelet-client-current.pem");
        let config = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nrotateCertificates: true\ncgroupDriver: systemd\n\
             authentication: {{x509: {{clientCAFile: {}}}}}\nstaticPodPath: {}\ncontainerRuntimeEndpoint: \"\"\n",
            node.path("etc/kubernetes/pki/ca.crt").display(),
            node.path("etc/kubernetes/manifests").display()
        );
        for (name, content) in [
            ("var/lib/kubelet/config.yaml", config),
            ("var/lib/kubelet/kubeadm-flags.env", "KUBELET_KUBEADM_ARGS=\"--max-pods=7\"\n".to_owned()),
            (
                "var/lib/kubelet/instance-config.yaml",
                "containerRuntimeEndpoint: \"unix:///run/containerd/containerd.sock\"\n".to_owned(),
            ),
            (
                "etc/kubernetes/kubelet.conf",
                node.cluster.kubeconfig(&format!("client-certificate: {0}, client-key: {0}", pem.display())),
            ),
            ("etc/kubernetes/pki/ca.crt", node.cluster.authority.clone()),
            ("etc/kubernetes/manifests/etcd.yaml", "kind: Pod\n".to_owned()),
            ("var/lib/kubelet/pki/kubelet-client-2026.pem", node.cluster.client.clone()),
        ] {
            node.write(name, &content);
        }
        symlink(node.path("var/lib/kubelet/pki/kubelet-client-2026.pem"), pem).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// Returns the command that the unit and the drop-in of kubeadm run.
    fn kubelet(&self) -> Command {
        let link = self.path("bin/kubelet");
        std::fs::create_dir_all(self.path("bin")).unwrap();
        if !link.exists() {
            symlink(PROGRAM, &link).unwrap();
        }
        let mut command = Command::new(link);
        let flag = |name: &str, path: &str| format!("--{name}={}", self.path(path).display());
        command
            .args([
                flag("bootstrap-kubeconfig", "etc/kubernetes/bootstrap-kubelet.conf"),
                flag("kubeconfig", "etc/kubernetes/kubelet.conf"),
                flag("config", "var/lib/kubelet/config.yaml"),
                "--max-pods=7".to_owned(),
                flag("root-dir", "var/lib/kubelet"),
                flag("run-dir", "run"),
                flag("log-dir", "log"),
                flag("bin-dir", "services"),
            ])
            .env("KUBELET_CONFIG_ARGS", "--config")
            .env("KUBELET_KUBEADM_ARGS", "--max-pods=7")
            .stdin(Stdio::null());
        command
    }

    /// Returns each file and directory with its type, owner, mode, time of change and content.
    fn content(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let mut dirs = vec![self.dir.path().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let metadata = std::fs::symlink_metadata(&path).unwrap();
                let bytes = if metadata.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
                let facts = (metadata.mode(), metadata.uid(), metadata.mtime(), metadata.mtime_nsec(), bytes);
                if metadata.is_dir() {
                    dirs.push(path.clone());
                }
                found.insert(path, format!("{facts:?}"));
            }
        }
        found
    }

    /// Runs the kubelet, which must not start, and returns its exit code and its error.
    fn refused(&self, change: impl FnOnce(&mut Command)) -> (Option<i32>, String) {
        let mut command = self.kubelet();
        change(&mut command);
        let before = self.content();
        let output = output_in_time(command);
        assert_eq!(self.content(), before, "a kubelet that does not start changes nothing");
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

/// Waits for a process, which is killed if it does not end.
fn output_in_time(mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let (ended, end) = std::sync::mpsc::channel();
    // The output is read while the process runs.
    let reader = std::thread::spawn(move || ended.send(child.wait_with_output().unwrap()));
    let output = end.recv_timeout(Duration::from_secs(20));
    if output.is_err() {
        kill(pid, Signal::SIGKILL).unwrap();
        panic!("it has started: {:?}", end.recv());
    }
    reader.join().unwrap().unwrap();
    output.unwrap()
}

#[test]
fn the_version_is_that_of_the_kubelet_which_kubeadm_compares() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("kubelet");
    symlink(PROGRAM, &link).unwrap();
    let output = Command::new(link).arg("--version").output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"Kubernetes v1.37.0\n"[..]));
}

/// The supervisor and its services, which end with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[test]
fn the_command_line_of_kubeadm_starts_the_services() {
    let node = Node::new();
    let args = node.path("args");
    std::fs::create_dir_all(&args).unwrap();
    std::fs::set_permissions(&args, std::fs::Permissions::from_mode(0o777)).unwrap();
    for name in SERVICES {
        let script = SERVICE.replace("ARGS", &args.display().to_string());
        node.write(&format!("services/{name}"), &script);
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(node.path(&format!("services/{name}")), executable).unwrap();
    }
    let mut command = node.kubelet();
    command.args(["--node-labels=tier=edge", "--hostname-override=n1"]).stdout(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    let line = |name: &str| {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match std::fs::read_to_string(args.join(name)) {
                Ok(line) => return line,
                Err(error) => assert!(Instant::now() < deadline, "{name} does not start: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let pod_sync = line("pod-sync");
    let places = node.path("etc/kubernetes");
    for wanted in [
        format!("--config {}", node.path("var/lib/kubelet/config.yaml").display()),
        format!("--manifests {}/manifests", places.display()),
        format!("--kubeconfig {}/kubelet.conf", places.display()),
        format!("--bootstrap-kubeconfig {}/bootstrap-kubelet.conf", places.display()),
        "--node-name n1".to_owned(),
        "--max-pods=7 --node-label=tier=edge".to_owned(),
    ] {
        assert!(pod_sync.contains(&wanted), "{wanted}: {pod_sync}");
    }
    assert!(line("status-reporter").contains("--node-label=tier=edge"));
    assert!(line("cri-proxy").contains("--runtime-endpoint unix:///run/containerd/containerd.sock"));
    assert!(line("node-api").contains("--client-ca-file"));
    kill(Pid::from_raw(running.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

/// Sockets of services that need no other service to begin. A program that is not the service's makes no such
/// socket.
const SOCKETS: [&str; 4] =
    ["cri/read/cri.sock", "pleg/pleg.sock", "probe/probe-0.sock", "status/status.sock"];

/// Starts the services with a copy of the binary that is alone in its directory.
fn start_alone(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    // Services with users of their own enter the directory.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("bin")).unwrap();
    let program = path("bin").join(name);
    if std::fs::hard_link(PROGRAM, &program).is_err() {
        std::fs::copy(PROGRAM, &program).unwrap();
    }
    // pod-sync fails before it changes anything on the machine.
    std::fs::create_dir(path("root")).unwrap();
    std::fs::write(path("root").join("pods"), "").unwrap();
    let flag = |name: &str, file: &str| format!("--{name}={}", path(file).display());
    let endpoint = format!("unix://{}", path("none.sock").display());
    let mut command = Command::new(&program);
    match name {
        "kubelet" => command.arg(format!("--container-runtime-endpoint={endpoint}")),
        _ => command.args(["quintctl", "up"]).arg(format!("--runtime-endpoint={endpoint}")),
    };
    command.args([flag("root-dir", "root"), flag("run-dir", "run"), flag("log-dir", "log")]);
    command.env_remove("KUBELET_CONFIG_ARGS").stdin(Stdio::null()).stdout(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    let log = |service: &str| {
        std::fs::read_to_string(path("log").join(format!("{service}.log"))).unwrap_or_default()
    };
    let missing = || {
        let is_missing = |socket: &&str| !path("run").join(socket).exists();
        SOCKETS.into_iter().filter(is_missing).collect::<Vec<_>>()
    };
    while !missing().is_empty() || !log("pod-sync").contains("service failed") {
        assert!(running.0.try_wait().unwrap().is_none(), "{name} exited");
        let logs = || SERVICES.map(|service| (service, log(service)));
        assert!(Instant::now() < deadline, "{name}: no {:?}: {:#?}", missing(), logs());
        std::thread::sleep(Duration::from_millis(10));
    }
    for service in SERVICES {
        assert!(!log(service).contains("usage"), "{service}: {}", log(service));
    }
    kill(Pid::from_raw(running.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_binary_without_links_beside_it_runs_the_services_itself() {
    start_alone("quintlet");
    start_alone("kubelet");
}

/// A file of kubeadm, and whether a node without it does not start.
const FILES: [(&str, bool); 7] = [
    ("var/lib/kubelet/config.yaml", true),
    ("var/lib/kubelet/kubeadm-flags.env", true),
    ("var/lib/kubelet/instance-config.yaml", false),
    ("etc/kubernetes/kubelet.conf", true),
    ("etc/kubernetes/pki/ca.crt", true),
    ("etc/kubernetes/manifests/etcd.yaml", false),
    ("var/lib/kubelet/pki/kubelet-client-2026.pem", true),
];

/// Asserts that an error is one line with the path, the cause and a remedy after it.
fn assert_one_line(text: &str, path: &Path, cause: &str) {
    let start = format!("kubelet: {} {cause}: ", path.display());
    let rest = text.strip_prefix(&start);
    assert!(rest.is_some_and(|rest| rest.len() > 10), "{start:?}: {text:?}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Returns the path by which the kubelet knows a file.
fn known_as(node: &Node, name: &str) -> PathBuf {
    let name = name.replace("kubelet-client-2026.pem", "kubelet-client-current.pem");
    node.path(&name)
}

#[test]
fn a_missing_file_of_kubeadm_is_named_with_the_remedy() {
    for (name, _) in FILES.iter().filter(|(_, required)| *required) {
        let node = Node::new();
        std::fs::remove_file(node.path(name)).unwrap();
        // systemd ignores a missing file of variables.
        let without_flags = |command: &mut Command| {
            if name.ends_with(".env") {
                command.env_remove("KUBELET_KUBEADM_ARGS");
            }
        };
        let (code, text) = node.refused(without_flags);
        assert_eq!(code, Some(69), "{name}: {text}");
        assert_one_line(&text, &known_as(&node, name), "does not exist");
        if name.ends_with("kubelet.conf") {
            assert!(text.contains("no bootstrap kubeconfig"), "{text}");
        }
    }
}

#[test]
fn an_empty_file_of_kubeadm_is_named_with_the_remedy() {
    for (name, _) in FILES {
        let node = Node::new();
        node.write(name, "\n");
        let (code, text) = node.refused(|_| {});
        assert_eq!(code, Some(64), "{name}: {text}");
        assert_one_line(&text, &known_as(&node, name), "is empty");
    }
}

#[test]
fn a_file_of_kubeadm_that_another_user_owns_is_named() {
    for (name, _) in FILES {
        let node = Node::new();
        chown(node.path(name), Some(1234), None).unwrap();
        let (code, text) = node.refused(|_| {});
        assert_eq!(code, Some(64), "{name}: {text}");
        assert_one_line(&text, &known_as(&node, name), "belongs to the user with ID 1234, not to root");
        assert!(text.contains("chown root "), "{text}");
    }
}

#[test]
fn a_file_of_kubeadm_that_cannot_be_read_is_named() {
    for (name, _) in FILES {
        let node = Node::new();
        let (code, text) = node.refused(|command| {
            // Another user may enter the directories and not read the files of root.
            std::fs::set_permissions(node.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
            for (other, _) in FILES.iter().filter(|(other, _)| *other != name) {
                std::fs::set_permissions(node.path(other), std::fs::Permissions::from_mode(0o644)).unwrap();
            }
            command.uid(65534).gid(65534);
        });
        assert_eq!(code, Some(69), "{name}: {text}");
        assert_one_line(&text, &known_as(&node, name), "cannot be read: Permission denied (os error 13)");
        // A directory cannot be read either.
        let node = Node::new();
        std::fs::remove_file(node.path(name)).unwrap();
        std::fs::create_dir(node.path(name)).unwrap();
        let (code, text) = node.refused(|_| {});
        assert_eq!(code, Some(69), "{name}: {text}");
        assert_one_line(&text, &known_as(&node, name), "cannot be read: Is a directory (os error 21)");
    }
}

#[test]
fn files_of_another_cluster_are_named() {
    let other = Cluster::new();
    let ca = |node: &Node| node.path("etc/kubernetes/pki/ca.crt").display().to_string();

    let node = Node::new();
    let user = std::fs::read_to_string(node.path("etc/kubernetes/kubelet.conf")).unwrap();
    let user = user.rsplit_once("user: {").unwrap().1.trim_end().trim_end_matches("}}]").to_owned();
    node.write("etc/kubernetes/kubelet.conf", &other.kubeconfig(&user));
    let (code, text) = node.refused(|_| {});
    assert_eq!(code, Some(64), "{text}");
    let cause = "is of another cluster: the authority of https://10.0.0.9:6443 is not in";
    assert_one_line(&text, &node.path("etc/kubernetes/kubelet.conf"), &format!("{cause} {}", ca(&node)));

    let node = Node::new();
    node.write("var/lib/kubelet/pki/kubelet-client-2026.pem", &other.client);
    let (code, text) = node.refused(|_| {});
    assert_eq!(code, Some(64), "{text}");
    let pem = node.path("var/lib/kubelet/pki/kubelet-client-current.pem");
    let cause = "is of another cluster: its certificate was not issued by";
    assert_one_line(&text, &pem, &format!("{cause} {}", ca(&node)));

    let node = Node::new();
    node.write("etc/kubernetes/pki/ca.crt", &other.authority);
    assert_eq!(node.refused(|_| {}).0, Some(64));

    let node = Node::new();
    std::fs::remove_file(node.path("etc/kubernetes/kubelet.conf")).unwrap();
    node.write("etc/kubernetes/bootstrap-kubelet.conf", &other.kubeconfig("token: a.b"));
    let (code, text) = node.refused(|_| {});
    assert_eq!(code, Some(64), "{text}");
    assert!(text.contains("bootstrap-kubelet.conf is of another cluster"), "{text}");
}

#[test]
fn flags_that_a_kubelet_does_not_have_or_that_are_refused_exit_64() {
    let node = Node::new();
    for (flag, reason) in [
        ("--pod-infra-container-image=pause", "the kubelet has removed the flag"),
        ("--no-such-flag", "unexpected argument"),
        ("--max-pods=many", "must be a whole number"),
    ] {
        let (code, text) = node.refused(|command| {
            command.arg(flag);
        });
        assert_eq!(code, Some(64), "{flag}: {text}");
        assert!(text.contains(reason), "{flag}: {text}");
    }
}
